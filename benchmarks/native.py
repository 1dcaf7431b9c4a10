"""Times of `ulpscope.native.measuring.measure` by size, dtype and what is asked for, the fallback beside it.

    python benchmarks/native.py

Microseconds per call, the best of several rounds, on memory that the call before has left in the cache.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

from ulpscope.native import measuring, measuring_fallback

WORK = {
    "stats": measuring.STATS,
    "stats+sketch": measuring.STATS | measuring.SKETCH,
    "stats+crc": measuring.STATS | measuring.CRC,
    "all": measuring.STATS | measuring.SKETCH | measuring.CRC,
}
DTYPES = {"f32": (0, np.uint32, 16), "bf16": (3, np.uint16, 0)}
SIZES = [256, 1000, 4 << 10, 64 << 10, 1 << 20]
ROUNDS = 7
SECONDS_A_ROUND = 0.02


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    repeat = max(1, int(SECONDS_A_ROUND / (time.perf_counter() - start)))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        best = min(best, (time.perf_counter() - start) / repeat)
    return best * 1e6


def main() -> None:
    out = sys.stdout.write
    if not measuring.HAVE_EXTENSION:
        out("the extension is not built: both columns show the fallback\n")
    out(f"{'dtype':6}{'elements':>10}" + "".join(f"{name:>14}{'fallback':>12}" for name in WORK) + "\n")
    generator = np.random.default_rng(0)
    for dtype, (code, word, shift) in DTYPES.items():
        for n in SIZES:
            # Sixteen bits of bfloat16, widened for float32: ordinary numbers of both signs.
            bits = generator.standard_normal(n).astype(np.float32).view(np.uint32) >> 16
            data = (bits << shift).astype(word)
            row = f"{dtype:6}{n:>10}"
            for flags in WORK.values():
                arguments = (data.ctypes.data, code, (n,), None, flags, 0, 0, 0)
                row += f"{microseconds(lambda a=arguments: measuring.measure(*a)):>14.2f}"
                row += f"{microseconds(lambda a=arguments: measuring_fallback.measure(*a)):>12.1f}"
            out(row + "\n")
    data = generator.standard_normal(1 << 20).astype(np.float32)
    for name, call in {
        "crc32": lambda: measuring.crc32(data),
        "fingerprint": lambda: measuring.fingerprint(data.ctypes.data, 4, data.shape, None),
    }.items():
        out(f"{name} of 4 MiB: {data.nbytes / microseconds(call) / 1e3:.1f} GB/s\n")


if __name__ == "__main__":
    main()
