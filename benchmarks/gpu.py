"""What a capture costs on a CUDA device: a bf16 Llama step bare, recorded and stopped, and the kernels alone.

    python benchmarks/gpu.py [--configs op,op-alike,module,mix,mix-alike,crc,tensors] [--rounds 10] [--tokens 1024] [--json out.json]
    python benchmarks/gpu.py --tool msprobe --packages DIR     the peer, from a folder it was installed into

Rounds step bare, recorded and stopped in turn, each after a bare step; a ratio is between medians. A recorded step begins before
`start` and ends after `stop` and `step`, the device idle before and after. Without the peer its figures of 2026-11-15 on an H200 stand beside ours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LAYERS = 8
# Megabytes of the tensors that kernels are timed on, and how often.
_SIZES, _TURNS = (8, 64, 256, 1024), 8
# Milliseconds of a recorded step, its ratio to the bare one of 24 ms, records.
PEER = {
    "op": (331, 13.4, 505),
    "module": (198, 8.3, 292),
    "mix": (645, 27.2, 797),
    "crc": (1261, 57.7, 505),
    "tensors": (14200, 515, 505),
}
TARGETS = {"op": 1.5, "module": 1.15, "mix": 1.6, "crc": 2.0}
for name in ("op", "mix"):  # of the calls that the peer records too
    PEER[f"{name}-alike"], TARGETS[f"{name}-alike"] = PEER[name], TARGETS[name]


class Llama:
    """A training step of a language model of half a billion parameters, on two sequences."""

    def __init__(self, tokens: int = 1024) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=LAYERS, num_attention_heads=16,
            num_key_value_heads=16, vocab_size=32000, max_position_embeddings=max(2048, tokens),
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).cuda().bfloat16()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self._tokens = torch.randint(0, 32000, (2, tokens), device="cuda")

    def step(self) -> None:
        self.model(input_ids=self._tokens, labels=self._tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def milliseconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def peak(work: Callable[[], Any]) -> int:
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated()


def measure(name: str, kind: str, folder: Path, workload: Llama, rounds: int) -> dict[str, Any]:
    from tools import CONFIGS, TOOLS

    options = getattr(CONFIGS[name], kind)
    tool = TOOLS[kind](folder, options)

    def recorded() -> None:
        tool.begin(workload.model)
        workload.step()
        tool.end()

    def forget() -> None:
        shutil.rmtree(tool.dump, ignore_errors=True)

    bare_peak = peak(workload.step)
    extra = peak(recorded) - bare_peak
    recorded()
    count = tool.count()
    forget()
    bare, on, off = [], [], []
    for _ in range(rounds if name != "tensors" else 2):
        for work, times in ((workload.step, bare), (recorded, on), (workload.step, off)):
            workload.step()  # what comes before is the same for all three
            times.append(milliseconds(work))
            forget()
    result = {"config": name, "bare": statistics.median(bare), "recorded": statistics.median(on), **count}
    result |= {"ratio": result["recorded"] / result["bare"], "stopped": statistics.median(off) / result["bare"]}
    return result | {"peak_mb": extra / 1e6}


def kernels() -> list[tuple[str, int, float, float]]:
    """For each type and size: microseconds of the device for a tensor, and the share of the rate at which it copies as much."""
    from ulpscope.frameworks.torch.cuda_gauge import CudaGauge
    from ulpscope.model.dtypes import DTYPES
    from ulpscope.native import measuring

    class Nowhere:
        unknown_measure = bytes(measuring.ROW.itemsize)

        def reserve_measure(self) -> int:
            return 0

        def complete_measures(self, numbers: Any, rows: Any, sketches: Any) -> None:
            return None

    def seconds(work: Callable[[], Any]) -> float:
        """For how long the device works on it: launches from Python take longer than a small kernel."""
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            for _ in range(_TURNS):
                work()
            torch.cuda.synchronize()
        return sum(event.device_time_total for event in profiled.key_averages()) / _TURNS / 1e6

    device = torch.device("cuda", 0)
    copies: dict[int, float] = {}
    for size in _SIZES:
        pairs = [torch.empty(2, size << 20, dtype=torch.uint8, device=device) for _ in range(max(1, 256 // size))]

        def copy_all(pairs: list[torch.Tensor] = pairs) -> None:
            for pair in pairs:
                pair[0].copy_(pair[1])

        copies[size] = sum(pair.numel() for pair in pairs) / seconds(copy_all)
    print(
        "copying, both directions counted: "
        + ", ".join(f"{size} MB {rate / 1e12:.2f} TB/s" for size, rate in copies.items())
    )
    del pairs, copy_all
    found = []
    for label, flags in (
        ("", measuring.STATS | measuring.SKETCH),
        (" no sketch", measuring.STATS),
        (" crc", measuring.STATS | measuring.SKETCH | measuring.CRC),
    ):
        gauge = CudaGauge(Nowhere(), device, flags)  # type: ignore[arg-type]
        for dtype in (torch.bfloat16, torch.float32):
            for size in _SIZES:
                values = [
                    torch.randn((size << 20) // dtype.itemsize, device=device, dtype=dtype)
                    for _ in range(max(1, 256 // size))
                ]
                plan = gauge.plan(values[0], DTYPES[str(dtype).removeprefix("torch.")])

                def work(values: list[torch.Tensor] = values, plan: Any = plan, gauge: CudaGauge = gauge) -> None:
                    for value in values:
                        gauge.measure(value, value.data_ptr(), plan)

                taken = seconds(work) / len(values)
                gauge.finish()
                found.append(
                    (str(dtype).removeprefix("torch.") + label, size, taken * 1e6, (size << 20) / taken / copies[size])
                )
    return found


def disk(folder: Path) -> float:
    """GB/s that dd writes there directly."""
    target = folder / "dd"
    start = time.perf_counter()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={target}", "bs=4M", "count=1500", "oflag=direct"], check=True, capture_output=True
    )
    taken = time.perf_counter() - start
    target.unlink()
    return 1500 * (4 << 20) / taken / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default="op,op-alike,module,mix,mix-alike,crc,tensors")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence; targets and peer are those of 1024")
    parser.add_argument("--tool", choices=("ulpscope", "msprobe"), default="ulpscope")
    parser.add_argument("--packages", help="a folder of further packages")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-kernels", action="store_true")
    options = parser.parse_args()
    if options.packages:
        sys.path.insert(0, options.packages)
    workload = Llama(options.tokens)
    for _ in range(5):
        workload.step()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        rate = disk(root) if "tensors" in options.configs else 0.0
        print(
            "| config | bare ms | recorded ms | ratio | target | stopped | records | us/record | peak MB | peer ms | peer ratio | times quicker |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|---|")
        for name in options.configs.split(","):
            row = measure(name, options.tool, root / name, workload, options.rounds)
            rows.append(row)
            took, ratio, _ = PEER[name]
            each = (row["recorded"] - row["bare"]) / max(1, row["records"]) * 1e3
            print(
                f"| {name} | {row['bare']:.1f} | {row['recorded']:.1f} | {row['ratio']:.2f} | {TARGETS.get(name, '-')} | {row['stopped']:.2f} "
                f"| {row['records']} | {each:.0f} | {row['peak_mb']:.0f} | {took} | {ratio} | {took / row['recorded']:.1f} |",
                flush=True,
            )
            if row["distinct"]:
                speed = row["distinct"] / 1e6 / (row["recorded"] - row["bare"])
                print(
                    f"\nfull tensors: {row['distinct'] / 1e9:.2f} GB at {speed:.2f} GB/s, dd {rate:.2f} GB/s: {speed / rate:.0%}\n"
                )
    found = [] if options.no_kernels or options.tool != "ulpscope" else kernels()
    for label, size, taken, share in found:
        print(f"{label:20s} {size:5d} MB {taken:8.1f} us {share:6.0%} of copy")
    if options.json:
        options.json.write_text(json.dumps({"steps": rows, "kernels": found}, indent=1))


if __name__ == "__main__":
    main()
