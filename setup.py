"""Declares the optional C extensions; everything else about the package is in pyproject.toml.

Without a compiler the build warns and goes on: `native_fallback`, `pairs_fallback` and the Python beside `_taps` do the same
work.
"""

import glob
import os
import sys
import sysconfig

from setuptools import Extension, setup

# A free-threaded interpreter has no limited API: there the build fails softly and the fallback serves.
limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")


def extension(name: str, *flags: str, includes: tuple[str, ...] = ()) -> Extension:
    return Extension(
        f"ulpscope.{name}",
        sources=[f"src/ulpscope/{name}.c"],
        depends=[f"src/ulpscope/{include}" for include in ("_abi.h", *includes)],
        py_limited_api=limited_api,
        define_macros=[("Py_LIMITED_API", "0x030a0000")],
        # Neither flag changes a result: they only drop errno and the floating-point exception flags.
        extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", *flags],
        optional=True,
        libraries=[] if os.name == "nt" else ["m", "dl"] if sys.platform == "linux" else ["m"],
    )


parts = sorted(os.path.basename(path) for path in glob.glob("src/ulpscope/_taps_*.c"))
direct = ["-fno-plt"] if sys.platform == "linux" else []
setup(
    # Without fused products the numbers of a comparison are the same on every machine.
    ext_modules=[
        extension("_native", includes=("_crc.h", "_half.h", "_measure.h")),
        extension("_pairs", "-ffp-contract=off", includes=("_crc.h", "_half.h", "_pairs_kernels.h", "_pairs_near.h")),
        # One unit that calls itself without a detour.
        extension("_taps", "-fvisibility=hidden", *direct, includes=("_taps.h", "_measure.h", *parts)),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited_api else {},
)
