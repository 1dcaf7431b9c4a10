"""What right kernels were seen to do: the table that ships with the package, and the user's own from `ulpscope calibrate`.

A line is a kernel, a dtype, a device and which of its results: how many calls were measured, and the largest root mean square,
worst element and mean lean, as multiples of what theory allows (`analyze.limits.theory`), and the largest share of results that
were not the nearest number. `tools/measure_kernels.py` made the shipped one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ulpscope.model.errors import DumpError

# A limit is so many times the largest error that was seen: other inputs do a little worse.
MARGIN = 1.5
VARIABLE = "ULPSCOPE_KERNELS"
_SHIPPED = Path(__file__).with_name("kernels.tsv")
_HEAD = "kernel\tdtype\tdevice\tresult\tcalls\trms\tworst\tlean\tmisrounded"

Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The largest errors of the calls of one kernel."""

    calls: int = 0
    rms: float = 0.0
    worst: float = 0.0
    lean: float = 0.0
    misrounded: float = 0.0

    def beside(self, other: Kernel) -> Kernel:
        """The larger of each."""
        return Kernel(
            self.calls + other.calls,
            max(self.rms, other.rms),
            max(self.worst, other.worst),
            max(self.lean, other.lean),
            max(self.misrounded, other.misrounded),
        )


def measured(name: str, dtype: str, device: str, place: int) -> Kernel | None:
    """What this kernel was seen to do; None where it was never measured. Results after the first are taken together."""
    return _tables().get((name, dtype, device, min(place, 1)))


def own_path() -> Path:
    """Where `ulpscope calibrate` keeps what this machine's kernels do."""
    told = os.environ.get(VARIABLE)
    if told:
        return Path(told)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ulpscope" / "kernels.tsv"


@functools.cache
def _tables() -> dict[Key, Kernel]:
    found = read_table(_SHIPPED) if _SHIPPED.exists() else {}
    if own_path().is_file():
        for key, kernel in read_table(own_path()).items():
            found[key] = kernel.beside(found.get(key, Kernel()))
    return found


def shipped() -> dict[Key, Kernel]:
    return read_table(_SHIPPED)


def read_table(path: Path) -> dict[Key, Kernel]:
    """Raises DumpError where the file is no such table."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DumpError(f"{path} cannot be read: {error}") from None
    return dict(_entries(path, lines))


def _entries(path: Path, lines: Iterable[str]) -> Iterator[tuple[Key, Kernel]]:
    for number, line in enumerate(lines, 1):
        if line.startswith("#") or line == _HEAD or not line:
            continue
        try:
            name, dtype, device, place, calls, *sizes = line.split("\t")
            rms, worst, lean, misrounded = map(float, sizes)
            yield (name, dtype, device, int(place)), Kernel(int(calls), rms, worst, lean, misrounded)
        except ValueError:
            raise DumpError(
                f"{path}, line {number} is no line of a table of kernels; `ulpscope calibrate` writes one"
            ) from None


def write_table(path: Path, table: dict[Key, Kernel], about: Iterable[str]) -> None:
    """Writes what was measured, and in comments where."""
    lines = [*(f"# {line}" for line in about), _HEAD]
    for (name, dtype, device, place), kernel in sorted(table.items()):
        sizes = [kernel.rms, kernel.worst, kernel.lean, kernel.misrounded]
        lines.append(
            "\t".join([name, dtype, device, str(place), str(kernel.calls), *(f"{size:.2g}" for size in sizes)])
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
