"""Declares the optional C extension; everything else about the package is in pyproject.toml.

Without a compiler the build warns and goes on: `ulpscope.native_fallback` does the same work in numpy.
"""

import os
import sysconfig

from setuptools import Extension, setup

# A free-threaded interpreter has no limited API: there the build fails softly and the fallback serves.
limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "ulpscope._native",
            sources=["src/ulpscope/_native.c"],
            py_limited_api=limited_api,
            define_macros=[("Py_LIMITED_API", "0x030a0000")],
            # Neither flag changes a result: they only drop errno and the floating-point exception flags.
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
            libraries=[] if os.name == "nt" else ["m"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited_api else {},
)
