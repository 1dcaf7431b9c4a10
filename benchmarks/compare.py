"""What comparing two dumps costs, ours and the peer's, run beside run.

    python benchmarks/compare.py [--peer PYTHON] [--rows 20000,60000,200000] [--megabytes 128,512,1024] [--rounds 3]

Dumps in the files of msprobe are made for the purpose: statistics with so many tensors, and full tensors with so many megabytes
a side. Both tools get the same files and write their own table, ours with the columns of the older tool, as xlsx. CPU is that of
the whole process with its children; memory is the largest resident size over that of a bare interpreter; of several rounds the
best counts. Without `--peer` ours is measured alone.

`growth` is what a further row or byte costs in the largest input over what it costs in the smallest: 1 is linear. `share` is the
rate at which ours takes further bytes (between the smallest and the largest input, so that starting Python does not count) over the
rate at which all cores read the same files, measured before and after.
"""

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.dtypes import DTYPES
from ulpscope.store.formats.pt import write_pt

TENSOR_SHAPE = (16, 160, 128)
ROWS_A_CALL = 6


@dataclass(frozen=True, slots=True)
class Cost:
    cpu: float
    wall: float
    megabytes: float


# --- inputs -----------------------------------------------------------------------------------------------------


def leaf(shape: tuple[int, ...], numbers: list[float], **more: Any) -> dict[str, Any]:
    statistics = dict(zip(("Max", "Min", "Mean", "Norm"), numbers, strict=True))
    kind = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": list(shape)}
    return kind | statistics | {"requires_grad": True} | more


def write_dump(folder: Path, task: str, data: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = str(folder / "dump_tensor_data") if task == "tensor" else None
    header = {"task": task, "level": "L1", "framework": "pytorch", "dump_data_dir": tensors}
    (folder / "dump.json").write_text(json.dumps({**header, "data": data}, indent=1))
    stacks = {"0": [list(data), ["File train.py, line 7, in step, \n loss = model(batch)"]]}
    (folder / "stack.json").write_text(json.dumps(stacks))
    (folder / "construct.json").write_text("{}")
    return folder / "dump.json"


def statistics_dump(folder: Path, rows: int, noise: float) -> Path:
    """Calls of a linear layer and their backward, six tensors each time, with numbers that differ by about `noise`."""
    generator = np.random.default_rng(0)
    off = np.random.default_rng(1)
    forward: dict[str, Any] = {}
    backward: dict[str, Any] = {}
    for call in range(rows // ROWS_A_CALL):
        numbers = generator.uniform(0.5, 2.0, (ROWS_A_CALL, 4)).astype(np.float32).astype(float)
        numbers *= 1 + noise * off.standard_normal(numbers.shape)
        x, w, y, dy, dx, dw = (
            leaf(shape, found.tolist()) for shape, found in zip([(8, 64), (32, 64), (8, 32)] * 2, numbers, strict=True)
        )
        arguments = {"input_args": [x, w, None], "input_kwargs": {}, "output": [y]}
        forward[f"Functional.linear.{call}.forward"] = arguments
        backward[f"Functional.linear.{call}.backward"] = {"input": [dy], "output": [dx, dw]}
    return write_dump(folder, "statistics", forward | dict(reversed(backward.items())))


def tensor_dump(folder: Path, megabytes: int, noise: float) -> Path:
    """Calls with an input and an output of 1.3 MB."""
    values = np.random.default_rng(0).standard_normal(TENSOR_SHAPE).astype(np.float32)
    values *= (1 + noise * np.random.default_rng(1).standard_normal(TENSOR_SHAPE)).astype(np.float32)
    numbers = [float(values.max()), float(values.min()), float(values.mean()), float(np.linalg.norm(values))]
    tensors = folder / "dump_tensor_data"
    tensors.mkdir(parents=True)
    data = {}
    for call in range((megabytes << 20) // values.nbytes // 2):
        name = f"Functional.relu.{call}.forward"
        files = [f"{name}.{slot}.0.pt" for slot in ("input", "output")]
        for file in files:
            write_pt(tensors / file, values.tobytes(), DTYPES["float32"], TENSOR_SHAPE)
        given, made = (leaf(TENSOR_SHAPE, numbers, data_name=file) for file in files)
        data[name] = {"input_args": [given], "input_kwargs": {}, "output": [made]}
    return write_dump(folder, "tensor", data)


def made(make: Callable[[Path, int, float], Path], folder: Path, size: int) -> list[Path]:
    """Two dumps, the second with other numbers. Another process makes them: a child begins with the peak of its parent."""
    sides = [(folder / side / "rank0", size, noise) for side, noise in (("a", 0.0), ("b", 1e-4))]
    with ProcessPoolExecutor(1) as pool:
        return [pool.submit(make, *side).result() for side in sides]


# --- measuring --------------------------------------------------------------------------------------------------


def cost_of(command: list[str]) -> Cost:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Cost(used.ru_utime + used.ru_stime, time.perf_counter() - start, used.ru_maxrss / 1024)


def ours(target: Path, reference: Path, out: Path) -> list[str]:
    config = out / "compare.json"
    config.write_text(
        json.dumps({"npu_path": str(target), "bench_path": str(reference), "is_print_compare_log": False})
    )
    compare = ["-f", "pytorch", "compare", "-i", str(config), "-o", str(out)]
    return [sys.executable, "-m", "ulpscope.compat.msprobe", *compare]


def peers(python: str) -> Callable[[Path, Path, Path], list[str]]:
    program = str(Path(python).parent / "msprobe")
    return lambda target, reference, out: [
        *(program, "compare", "-tp", str(target), "-gp", str(reference), "-o", str(out))
    ]


def best(costs: list[Cost]) -> Cost:
    return Cost(*(min(getattr(cost, field) for cost in costs) for field in ("cpu", "wall", "megabytes")))


def measured(
    tools: dict[str, Callable[[Path, Path, Path], list[str]]], reference: Path, target: Path, rounds: int
) -> dict[str, Cost]:
    found: dict[str, list[Cost]] = {name: [] for name in tools}
    for _ in range(rounds):
        for name, command in tools.items():
            with tempfile.TemporaryDirectory(dir=reference.parents[1]) as out:
                found[name].append(cost_of(command(target, reference, Path(out))))
    return {name: best(costs) for name, costs in found.items()}


def read_both(pair: tuple[Path, Path]) -> int:
    total = 0
    for path in pair:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            words = np.frombuffer(mapping, np.uint64, len(mapping) // 8)
            np.add.reduce(words)
            total += len(mapping)
            del words
    return total


def bandwidth(reference: Path, target: Path) -> float:
    """GB/s at which all cores read the files of two dumps side by side."""
    files = sorted(path.name for path in (reference.parent / "dump_tensor_data").iterdir())
    folders = [dump.parent / "dump_tensor_data" for dump in (reference, target)]
    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        total = sum(pool.map(read_both, [(folders[0] / name, folders[1] / name) for name in files]))
    return total / (time.perf_counter() - start) / 1e9


# --- the run ----------------------------------------------------------------------------------------------------


def table(sizes: list[int], unit: str, found: list[dict[str, Cost]], bare: float) -> Iterator[str]:
    yield f"| {unit} | tool | CPU s | wall s | MB | times our CPU | times our wall |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for size, costs in zip(sizes, found, strict=True):
        for name, cost in costs.items():
            factors = f"{cost.cpu / costs['ulpscope'].cpu:.1f} | {cost.wall / costs['ulpscope'].wall:.1f}"
            numbers = f"{cost.cpu:.2f} | {cost.wall:.2f} | {cost.megabytes - bare:.0f}"
            yield f"| {size:,} | {name} | {numbers} | {factors} |"
    for name in found[0]:
        steps = [
            (after[name].cpu - before[name].cpu) / (larger - smaller)
            for before, after, smaller, larger in zip(found, found[1:], sizes, sizes[1:], strict=False)
        ]
        yield f"growth of {name}: {steps[-1] / steps[0]:.2f}, at last {steps[-1] * 1e6:.1f} us of CPU for one more of {unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="the Python of an environment with mindstudio-probe 26")
    parser.add_argument("--rows", default="20000,60000,200000")
    parser.add_argument("--megabytes", default="128,512,1024")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="where the dumps are made; by default a temporary folder")
    asked = parser.parse_args()
    tools = {"ulpscope": ours} | ({"msprobe": peers(asked.peer)} if asked.peer else {})
    scratch = Path(tempfile.mkdtemp(dir=asked.scratch))
    bare = cost_of([sys.executable, "-c", ""]).megabytes
    try:
        rows, found = [int(size) for size in asked.rows.split(",")], []
        for size in rows:
            sides = made(statistics_dump, scratch / f"rows{size}", size)
            found.append(measured(tools, sides[0], sides[1], asked.rounds))
        print(*table(rows, "rows", found, bare), sep="\n", flush=True)
        sizes, found, read = [int(size) for size in asked.megabytes.split(",")], [], []
        for size in sizes:
            sides = made(tensor_dump, scratch / f"tensors{size}", size)
            read.append(bandwidth(*sides))
            found.append(measured(tools, sides[0], sides[1], asked.rounds))
            read.append(bandwidth(*sides))
        print(*table(sizes, "MB a side", found, bare), sep="\n")
        longer = found[-1]["ulpscope"].wall - found[0]["ulpscope"].wall
        rate = 2 * (sizes[-1] - sizes[0]) * 1.048576e-3 / longer
        print(f"reading alone {max(read):.1f} GB/s, comparing {rate:.1f} GB/s more: share {rate / max(read):.2f}")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
