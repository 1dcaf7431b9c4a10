"""What comparing two dumps costs, ours and the peer's, run beside run.

    python benchmarks/compare.py [--peer PYTHON] [--rows 20000,60000,200000] [--megabytes 128,512,1024] [--rounds 3]
                                 [--dtypes float32,bfloat16,float16]

Dumps in the files of msprobe are made for the purpose: statistics with so many tensors, and full tensors with so many megabytes
a side. Both tools get the same files and write their own table, ours with the columns of the older tool, as xlsx. CPU is that of
the whole process with its children; memory is the largest resident size over that of a bare interpreter; of several rounds the
best counts. Without `--peer` ours is measured alone. Then the same tensors as native dumps, by `ulpscope compare`, and both kinds in
the other dtypes, the smallest and the largest input alone.

`growth` is what a further row or byte costs in the largest input over what it costs in the smallest: 1 is linear. `share` is the
rate at which ours takes further bytes (between the smallest and the largest input, so that starting Python does not count) over the
rate at which all cores read the same files: two streams, from the page cache, through mappings made for it, added up as integers,
in turns with ours, and the best counts. `of the CPU` is the same of CPU time, which a busy machine does not change as much. No
element of the target but those that round to the same number equals the reference's.
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

from ulpscope.model.dtypes import DTYPES, DType
from ulpscope.store.convert import write_native
from ulpscope.store.files.pt import write_pt
from ulpscope.store.registry import open_dump

TENSOR_SHAPE = (16, 160, 128)
ROWS_A_CALL = 6
PIECE = 4 << 20
# What makes the command line from target, reference and a folder for results.
Tools = dict[str, Callable[[Path, Path, Path], list[str]]]


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


def bits_of(values: np.ndarray, dtype: DType) -> bytes:
    if dtype.name != "bfloat16":
        return values.astype(dtype.bits).tobytes()
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def tensor_dump(folder: Path, megabytes: int, noise: float, name: str = "float32") -> Path:
    """Calls with an input and an output of 1.3 MB, in float32."""
    dtype = DTYPES[name]
    values = np.random.default_rng(0).standard_normal(TENSOR_SHAPE)
    values *= 1 + noise * np.random.default_rng(1).standard_normal(TENSOR_SHAPE)
    numbers = [float(values.max()), float(values.min()), float(values.mean()), float(np.linalg.norm(values))]
    bits = bits_of(values, dtype)
    tensors = folder / "dump_tensor_data"
    tensors.mkdir(parents=True)
    data = {}
    for call in range((megabytes << 20) // len(bits) // 2):
        call_name = f"Functional.relu.{call}.forward"
        files = [f"{call_name}.{slot}.0.pt" for slot in ("input", "output")]
        for file in files:
            write_pt(tensors / file, bits, dtype, TENSOR_SHAPE)
        given, made = (leaf(TENSOR_SHAPE, numbers, data_name=file, dtype=f"torch.{name}") for file in files)
        data[call_name] = {"input_args": [given], "input_kwargs": {}, "output": [made]}
    return write_dump(folder, "tensor", data)


def native_dump(folder: Path, dump: Path) -> Path:
    """The same dump in our own format."""
    write_native(open_dump(dump.parent), folder / "step0" / "rank0")
    return folder


def made(make: Callable[..., Path], folder: Path, size: int, *more: str) -> list[Path]:
    """Two dumps, the second with other numbers. Another process makes them: a child begins with the peak of its parent."""
    sides = [(folder / side / "rank0", size, noise, *more) for side, noise in (("a", 0.0), ("b", 1e-4))]
    with ProcessPoolExecutor(1) as pool:
        return [pool.submit(make, *side).result() for side in sides]


def made_native(folder: Path, sides: list[Path]) -> list[Path]:
    with ProcessPoolExecutor(1) as pool:
        return [pool.submit(native_dump, folder / name, side).result() for name, side in zip("ab", sides, strict=True)]


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


def ours_native(target: Path, reference: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "ulpscope", "compare", str(reference), str(target), "-q", "--exit-zero"]


def peers(python: str) -> Callable[[Path, Path, Path], list[str]]:
    program = str(Path(python).parent / "msprobe")
    return lambda target, reference, out: [
        *(program, "compare", "-tp", str(target), "-gp", str(reference), "-o", str(out))
    ]


def best(costs: list[Cost]) -> Cost:
    return Cost(*(min(getattr(cost, field) for cost in costs) for field in ("cpu", "wall", "megabytes")))


def measured(tools: Tools, reference: Path, target: Path, rounds: int) -> dict[str, Cost]:
    found: dict[str, list[Cost]] = {name: [] for name in tools}
    for _ in range(rounds):
        for name, command in tools.items():
            with tempfile.TemporaryDirectory() as out:
                found[name].append(cost_of(command(target, reference, Path(out))))
    return {name: best(costs) for name, costs in found.items()}


# Two files and the bytes of them that one thread reads in one go.
Piece = tuple[Path, Path, int, int]


def read_both(piece: Piece) -> int:
    reference, target, start, stop = piece
    for path in (reference, target):
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), stop - start, access=mmap.ACCESS_READ, offset=start) as mapped,
        ):
            words = np.frombuffer(mapped, np.uint64, (stop - start) // 8)
            np.add.reduce(words)
            del words
    return 2 * (stop - start)


def pieces(reference: Path, target: Path) -> list[Piece]:
    """Of msprobe's dumps a file is a piece, of native ones so many megabytes."""
    if reference.is_file():
        files = sorted(path.name for path in (reference.parent / "dump_tensor_data").iterdir())
        both = [[dump.parent / "dump_tensor_data" / name for dump in (reference, target)] for name in files]
    else:
        both = [[dump / "step0" / "rank0" / "payload.bin" for dump in (reference, target)]]
    return [
        (left, right, start, min(start + PIECE, left.stat().st_size))
        for left, right in both
        for start in range(0, left.stat().st_size, PIECE)
    ]


def reading(reference: Path, target: Path) -> tuple[float, float]:
    """GB/s at which all cores read the files of two dumps side by side, and GB for a second of CPU."""
    work = pieces(reference, target)
    start, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        total = sum(pool.map(read_both, work)) / 1e9
    return total / (time.perf_counter() - start), total / (time.process_time() - cpu)


@dataclass(frozen=True, slots=True)
class Share:
    """GB/s of both, and GB for a second of CPU."""

    read: tuple[float, float]
    compared: tuple[float, float]

    def __str__(self) -> str:
        wall, cpu = (mine / alone for mine, alone in zip(self.compared, self.read, strict=True))
        rates = f"reading alone {self.read[0]:.1f} GB/s, comparing {self.compared[0]:.1f} GB/s more"
        return f"{rates}: share {wall:.2f}, of the CPU {cpu:.2f}"


def share_of(sizes: list[int], found: list[Cost], read: list[tuple[float, float]]) -> Share:
    further = 2 * (sizes[-1] - sizes[0]) * 1.048576e-3
    compared = further / (found[-1].wall - found[0].wall), further / (found[-1].cpu - found[0].cpu)
    return Share((max(rate for rate, _ in read), max(rate for _, rate in read)), compared)


def in_turns(tools: Tools, sides: list[Path], rounds: int, read: list[tuple[float, float]]) -> dict[str, Cost]:
    """The cost of each tool; how fast the files can be read is added to `read`."""
    found: list[dict[str, Cost]] = []
    for _ in range(rounds):
        read.append(reading(*sides))
        found.append(measured(tools, sides[0], sides[1], 1))
    read.append(reading(*sides))
    return {name: best([each[name] for each in found]) for name in tools}


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


def shares(scratch: Path, name: str, sizes: list[int], rounds: int) -> Iterator[str]:
    """The shares of a dtype, in msprobe's files and in native ones."""
    costs: dict[str, list[Cost]] = {".pt": [], "native": []}
    read: dict[str, list[tuple[float, float]]] = {".pt": [], "native": []}
    for size in sizes:
        folder = scratch / f"{name}-{size}"
        sides = [folder / side / "rank0" / "dump.json" for side in "ab"]
        if not folder.exists():
            sides = made(tensor_dump, folder, size, name)
        natives = made_native(folder / "native", sides)
        for kind, tool, pair in ((".pt", ours, sides), ("native", ours_native, natives)):
            costs[kind].append(in_turns({kind: tool}, pair, rounds, read[kind])[kind])
        shutil.rmtree(folder)
    for kind in costs:
        yield f"{name} {kind}: {share_of(sizes, costs[kind], read[kind])}, {costs[kind][-1].megabytes:.0f} MB resident"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="the Python of an environment with mindstudio-probe 26")
    parser.add_argument("--rows", default="20000,60000,200000")
    parser.add_argument("--megabytes", default="128,512,1024")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
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
            sides = made(tensor_dump, scratch / f"float32-{size}", size)
            found.append(in_turns(tools, sides, asked.rounds, read))
        print(*table(sizes, "MB a side", found, bare), sep="\n")
        print(f"float32 .pt: {share_of(sizes, [each['ulpscope'] for each in found], read)}", flush=True)
        for name in asked.dtypes.split(","):
            for line in shares(scratch, name, [sizes[0], sizes[-1]], asked.rounds):
                print(line, flush=True)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
