"""One step under free_benchmark, for any of the tools: PERT_MODE PORT, in a folder of its own. Prints where the table is."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

mode, port = sys.argv[1:]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", rank=0, world_size=1)  # the peer writes no row without one

from msprobe.pytorch import PrecisionDebugger  # noqa: E402

section = {"scope": [], "list": [], "fuzz_device": "npu", "pert_mode": mode, "handler_type": "check"}
section |= {"fuzz_level": "L1", "fuzz_stage": "forward"}
config = {"task": "free_benchmark", "dump_path": str(Path.cwd() / "out"), "rank": [], "step": [], "level": "L1"}
Path("config.json").write_text(json.dumps({**config, "free_benchmark": section}))
debugger = PrecisionDebugger(config_path="config.json")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).half()
x = torch.randn(16, 32).half()
debugger.start(model)
y = model(x)
z = torch.matmul(y, y.t())
z.float().softmax(-1)
debugger.stop()
debugger.step()
