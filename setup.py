"""Declares the C extensions and who compiles them; everything else about the package is in pyproject.toml.

Where no C compiler works zig's does, which comes with the package `ziglang`: it is asked for there, and only there, as a
requirement of the build. ULPSCOPE_ZIG_TARGET=aarch64-linux-gnu.2.17 compiles with it for elsewhere (`make wheels`).
A part that cannot be built fails the build; with ULPSCOPE_BUILD_OPTIONAL=1 it is left out, and what is in Python works in its place.
"""

import glob
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

# A free-threaded interpreter has no limited API, and Microsoft's compiler not the vectors of the others: there Python serves.
limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")
optional = os.environ.get("ULPSCOPE_BUILD_OPTIONAL") == "1" or not limited_api or os.name == "nt"
target = os.environ.get("ULPSCOPE_ZIG_TARGET", "")
ZIG = "ziglang>=0.13"


def compiler_works() -> bool:
    """Whether the compiler that would be called makes a shared library of a file that includes the C library's headers."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.c")
        with open(source, "w") as file:
            file.write("#include <math.h>\n#include <stdlib.h>\nint probe(void) { return abs(1); }\n")
        try:
            made = subprocess.run([*command, "-shared", "-fPIC", "-o", source + ".so", source], capture_output=True)
        except OSError:
            return False
        return made.returncode == 0


with_zig = bool(target) or (limited_api and os.name == "posix" and not compiler_works())


class Build(build_ext):
    def build_extensions(self) -> None:
        if with_zig:
            # The interpreter's own flags are for the compiler it was made with; `native` would mean this very processor.
            zig = [sys.executable, "-m", "ziglang", "cc", *(["-target", target] if target else []), "-mcpu=baseline"]
            shared = ["-shared", "-s", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]
            self.compiler.set_executables(
                compiler_so=[*zig, "-fPIC", "-fwrapv", "-DNDEBUG", "-Wall"], linker_so=[*zig, *shared]
            )
            os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", os.path.abspath(os.path.join(self.build_temp, "zig")))
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        headers = sysconfig.get_path("include")
        try:
            if with_zig and not importlib.util.find_spec("ziglang"):
                raise CompileError(f"no C compiler works here and {ZIG} is not installed")
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            problem = str(error)
            if not os.path.exists(os.path.join(headers, "Python.h")):
                problem = f"there is no Python.h in {headers}; Debian has it in python3-dev, Fedora in python3-devel"
            less = "ULPSCOPE_BUILD_OPTIONAL=1 leaves out what cannot be built, which is slower"
            raise CompileError(f"{ext.name} was not built: {problem}. {less}.") from error


def extension(name: str, *flags: str, source: str = "", includes: tuple[str, ...] = ()) -> Extension:
    return Extension(
        f"ulpscope.native._{name}",
        sources=[f"src/ulpscope/native/{source or name}.c"],
        depends=[f"src/ulpscope/native/{include}" for include in ("abi.h", *includes)],
        py_limited_api=limited_api,
        define_macros=[("Py_LIMITED_API", "0x030a0000")],
        # Neither flag changes a result: they only drop errno and the floating-point exception flags.
        extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", *flags],
        optional=optional,
        libraries=[] if os.name == "nt" else ["m", "dl"] if sys.platform == "linux" else ["m"],
    )


def tag() -> dict[str, str]:
    """What a wheel says of whom it is for."""
    found = {"py_limited_api": "cp310"} if limited_api else {}
    if target:
        arch, glibc = target.split("-linux-gnu.")
        found["plat_name"] = f"manylinux_{glibc.replace('.', '_')}_{arch}"
    return found


parts = sorted(os.path.basename(path) for path in glob.glob("src/ulpscope/native/*.[ch]"))
direct = ["-fno-plt"] if sys.platform == "linux" else []
setup(
    cmdclass={"build_ext": Build},
    setup_requires=[ZIG] if with_zig else [],
    # Without fused products the numbers of a comparison are the same on every machine.
    ext_modules=[
        extension("measure", includes=("cpu.h", "crc.h", "half.h", "measure.h", "measure_kernels.h", "schema.h")),
        extension(
            "pairs", "-ffp-contract=off", includes=("cpu.h", "crc.h", "half.h", "pairs_kernels.h", "pairs_near.h")
        ),
        # One unit that calls itself without a detour.
        extension("taps", "-fvisibility=hidden", *direct, source="capture", includes=tuple(parts)),
    ],
    options={"bdist_wheel": tag()},
)
