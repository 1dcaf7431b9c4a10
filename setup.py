"""Declares the optional C extensions; everything else about the package is in pyproject.toml.

Without a compiler the build warns and goes on: `native_fallback`, `pairs_fallback` and the Python beside each of the others
do the same work.
"""

import os
import sys
import sysconfig

from setuptools import Extension, setup

# A free-threaded interpreter has no limited API: there the build fails softly and the fallback serves.
limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")


def extension(name: str, *flags: str, includes: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> Extension:
    return Extension(
        f"ulpscope.{name}",
        sources=[f"src/ulpscope/{file.replace('.', '/')}.c" for file in (name, *more)],
        depends=[f"src/ulpscope/{include}" for include in ("_abi.h", *includes)],
        py_limited_api=limited_api,
        define_macros=[("Py_LIMITED_API", "0x030a0000")],
        # Neither flag changes a result: they only drop errno and the floating-point exception flags.
        extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", *flags],
        optional=True,
        libraries=[] if os.name == "nt" else ["m", "dl"] if sys.platform == "linux" else ["m"],
    )


setup(
    # Without fused products the numbers of a comparison are the same on every machine.
    ext_modules=[
        extension("_native", includes=("_crc.h", "_half.h")),
        extension("_making"),
        extension("_pairs", "-ffp-contract=off", includes=("_crc.h", "_half.h", "_pairs_kernels.h", "_pairs_near.h")),
        extension(
            "_taps",
            includes=("_taps.h",),
            more=(
                "_taps_numbers",
                "_taps_modes",
                "_taps_modules",
                "_taps_fast",
                "_taps_backward",
                "_taps_doors",
                "_taps_edges",
                "_taps_gate",
                "_taps_gauge",
                "_taps_torch",
            ),
        ),
        extension("store.formats._leaves"),
        extension("report._cells"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited_api else {},
)
