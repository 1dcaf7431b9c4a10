"""How fast two tensors are compared element by element, beside the speed at which their memory can be read at all.

    python benchmarks/pairs.py [megabytes of one tensor]

Both tensors lie in mapped files that are in the page cache.  Everything is measured in turns within one run, and the
best of the rounds counts: on a shared machine only the ratios mean something.  `read` is a numpy reduction over both
files; `share` is the contrast's rate with two threads over that of reading with two; `naive` computes the same metrics
with numpy in float64, one after the other.  GB/s of both tensors together.
"""

import json
import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ulpscope.compare.metrics import METRICS, contrast_bits
from ulpscope.model.dtypes import DTYPES, DType, values_from
from ulpscope.native import pairs

ROUNDS = 9
CHUNK = 1 << 24
NAIVE_ELEMENTS = 1 << 21
PAIRS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float64", "float64"),
    ("int64", "int64"),
    ("bfloat16", "float32"),
]
Stream = tuple[memoryview, DType]


def bits_of(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype.name == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return (values * 1e6 if "int" in dtype.name else values).astype(dtype.bits)


def mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def streams(folder: Path, left: str, right: str, elements: int) -> tuple[Stream, Stream]:
    """Normal numbers, and the same ones a thousandth off."""
    generator = np.random.default_rng(0)
    found = []
    values = generator.standard_normal(1 << 20)
    noisy = values * (1 + 1e-3 * generator.standard_normal(1 << 20))
    for side, (name, numbers) in enumerate(((left, values), (right, noisy))):
        path = folder / f"{left}-{right}-{side}"
        bits = bits_of(numbers, DTYPES[name]).tobytes()
        with path.open("wb") as file:
            for _ in range(elements >> 20):
                file.write(bits)
        found.append((mapped(path), DTYPES[name]))
    return found[0], found[1]


def part(stream: Stream, index: int, of: int) -> memoryview:
    memory, dtype = stream
    step = len(memory) // dtype.itemsize // of * dtype.itemsize
    return memory[index * step : (index + 1) * step]


def read(reference: memoryview, target: memoryview) -> None:
    ours, theirs = np.frombuffer(reference, np.uint64), np.frombuffer(target, np.uint64)
    for start in range(0, max(len(ours), len(theirs)), CHUNK // 8):
        np.add.reduce(ours[start : start + CHUNK // 8])
        np.add.reduce(theirs[start : start + CHUNK // 8])


def naive(reference: Stream, target: Stream) -> None:
    r, t = (
        values_from(memory[: NAIVE_ELEMENTS * dtype.itemsize], dtype, (NAIVE_ELEMENTS,)).astype(np.float64)
        for memory, dtype in (reference, target)
    )
    difference = np.abs(t - r)
    with np.errstate(all="ignore"):
        relative = np.where(difference == 0, 0.0, difference / np.abs(r))
    _ = np.dot(r, t) / (np.linalg.norm(r) * np.linalg.norm(t)), np.linalg.norm(difference), difference.max()
    _ = relative.max(), relative.mean(), (relative < 0.001).mean(), (relative < 0.005).mean()
    ulps = difference / np.spacing(np.abs(r).astype(np.float32)).astype(np.float64)
    _ = ulps.max(), ulps.mean(), np.isfinite(r).all(), np.isfinite(t).all()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def on_threads(count: int, work: Callable[[int, int], object]) -> None:
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, index, count) for index in range(count)]:
            done.result()


def rates(reference: Stream, target: Stream) -> dict[str, float]:
    """GB/s by what is done, the best of the rounds."""

    def reading(index: int, of: int) -> None:
        read(part(reference, index, of), part(target, index, of))

    def contrasting(index: int, of: int) -> None:
        found = contrast_bits(part(reference, index, of), reference[1], part(target, index, of), target[1])
        for metric in METRICS.values():
            metric(found)

    def same(index: int, of: int) -> None:
        contrast_bits(part(reference, index, of), reference[1], part(reference, index, of), reference[1])

    total = len(reference[0]) + len(target[0])
    little = NAIVE_ELEMENTS * (reference[1].itemsize + target[1].itemsize)
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "read 1": (total, lambda: on_threads(1, reading)),
        "read 2": (total, lambda: on_threads(2, reading)),
        "contrast 1": (total, lambda: on_threads(1, contrasting)),
        "contrast 2": (total, lambda: on_threads(2, contrasting)),
        "identical 1": (2 * len(reference[0]), lambda: on_threads(1, same)),
        "naive": (little, lambda: naive(reference, target)),
    }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(ROUNDS):
        for name, (_, call) in work.items():
            best[name] = min(best[name], seconds(call))
    return {name: work[name][0] / best[name] / 1e9 for name in work}


def skipping() -> str:
    record = {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [4, 8, 16],
        "Max": 1.25,
        "Min": -0.5,
        "Mean": 0.01,
    }
    text = json.dumps({"data": [{"args": [record] * 4, "kwargs": {}, "output": [record]}] * 20000}).encode()
    skip, parse = (
        min(seconds(call) for _ in range(5)) for call in (lambda: pairs.skip_json(text, 0), lambda: json.loads(text))
    )
    return f"skip_json: {len(text) / skip / 1e9:.1f} GB/s over {len(text) / 1e6:.0f} MB; json.loads {len(text) / parse / 1e9:.3f}"


def main() -> None:
    out = sys.stdout.write
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    if not pairs.HAVE_EXTENSION:
        out("the extension is not built: this is the fallback\n")
    out(f"{'reference':10}{'target':10}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (left, right) in enumerate(PAIRS):
            elements = (megabytes << 20) // DTYPES[right].itemsize
            found = rates(*streams(Path(folder), left, right, elements))
            if not number:
                out("".join(f"{name:>12}" for name in found) + f"{'share':>8}{'x naive':>9}\n")
            out(f"{left:10}{right:10}" + "".join(f"{rate:>12.2f}" for rate in found.values()))
            share, gain = found["contrast 2"] / found["read 2"], found["contrast 1"] / found["naive"]
            out(f"{share:>8.0%}{gain:>9.1f}\n")
            for path in Path(folder).iterdir():
                path.unlink()
    out(skipping() + "\n")


if __name__ == "__main__":
    main()
