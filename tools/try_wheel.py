"""Whether the C parts of an installed wheel load on this machine and give what the Python beside them gives; needs numpy, not torch.

python tools/try_wheel.py ARCHITECTURE
"""

import platform
import sys
from importlib import import_module
from pathlib import Path

import numpy as np

import ulpscope
from ulpscope.model.dtypes import DTYPES
from ulpscope.native import measuring, measuring_fallback, pairs, pairs_fallback, taps

PACKAGE = Path(ulpscope.__file__).parent
EVERYTHING = measuring.STATS | measuring.CRC | measuring.SKETCH
KINDS = ("float32", "float64", "float16", "int8", "int64", "uint8")


def parts() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.so")):
        name = ".".join(("ulpscope", *path.relative_to(PACKAGE).parent.parts, path.name.partition(".")[0]))
        assert import_module(name).__file__ == str(path)
        found.append(name)
    assert measuring.HAVE_EXTENSION and pairs.HAVE_EXTENSION and taps.HAVE_EXTENSION, found
    return found


def rows_are_those_of_python() -> None:
    for name in KINDS:
        for size in (0, 1, 255, 257, 70001):
            values = (100 * np.sin(np.arange(float(size)))).astype(name)
            if values.dtype.kind == "f" and size > 9:
                values[5:9] = np.nan, np.inf, -np.inf, 0
            place = (values.ctypes.data, DTYPES[name].code, values.shape, None, EVERYTHING, 0, 0, 0)
            ours, python = measuring.measure(*place), measuring_fallback.measure(*place)
            row, other = (np.frombuffer(each[: measuring.ROW.itemsize], measuring.ROW)[0] for each in (ours, python))
            for field in measuring.ROW.names or ():
                near = field in ("sum", "norm") and np.isclose(row[field], other[field], rtol=1e-12)
                assert near or row[field] == other[field], (name, size, field, row, other)
            sketches = [np.frombuffer(each[measuring.ROW.itemsize :], np.float32) for each in (ours, python)]
            assert np.allclose(*sketches, rtol=1e-6, atol=1e-3), (name, size)


def contrasts_are_those_of_python() -> None:
    for name in KINDS:
        left = (100 * np.sin(np.arange(70001.0))).astype(name)
        right = (100 * np.sin(np.arange(70001.0)) * (1 + 1e-3 * np.cos(np.arange(70001.0)))).astype(name)
        totals = []
        for module in (pairs, pairs_fallback):
            state = bytearray(pairs.STATE.itemsize)
            module.contrast(left.tobytes(), DTYPES[name].code, right.tobytes(), DTYPES[name].code, state)
            totals.append(module.totals(state))
        ours = [getattr(totals[0], field) for field in pairs.Totals.__dataclass_fields__]
        assert np.allclose(ours, totals[1], rtol=1e-12), (name, totals)
        assert ours[1] > 0


if __name__ == "__main__":
    assert platform.machine() == sys.argv[1], f"this is {platform.machine()}"
    loaded = parts()
    rows_are_those_of_python()
    contrasts_are_those_of_python()
    print(f"{sys.argv[1]}: {len(loaded)} C parts load and agree with Python: {', '.join(loaded)}")
