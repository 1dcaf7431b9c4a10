"""One process: one workload, with or without one tool. Takes a JSON command per line and answers each with a line.

    {"do": "step", "record": true, "times": 3, "count": false}   {"do": "quit"}

Whatever the workload or the tool prints goes to stderr, which is the worker's log.
"""

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import tools
import torch
import workloads


class Peak:
    """The most memory this process has held since `reset`, in bytes; 0 where the system does not tell."""

    def reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass

    def read(self) -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def timed_step(work: workloads.Workload, tool: tools.Tool | None) -> dict[str, float]:
    peak = Peak()
    peak.reset()
    cpu, wall = time.process_time(), time.perf_counter()
    if tool is not None:
        tool.begin(work.model)
    work.step()
    if tool is not None:
        tool.end()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"cpu": cpu, "wall": wall, "peak": peak.read()}


def steps(work: workloads.Workload, tool: tools.Tool | None, command: dict[str, Any]) -> dict[str, Any]:
    recording = tool if command["record"] else None
    answer: dict[str, Any] = {"steps": []}
    for number in range(command["times"]):
        answer["steps"].append(timed_step(work, recording))
        if recording is not None:
            if command["count"] and not number:
                answer["count"] = recording.count()
            shutil.rmtree(recording.dump)
    return answer


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    try:
        tool = None
        if order["tool"] is not None:
            tool = tools.TOOLS[order["tool"]](Path(order["folder"]), order["options"])
        work = workloads.WORKLOADS[order["workload"]](**order["sizes"])
        reply({"torch": torch.__version__})
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "quit":
                break
            reply(steps(work, tool, command))
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"[:300]})
    os._exit(0)  # without the tools' own work at exit


if __name__ == "__main__":
    main()
