"""Makes the wheels of a release, for Linux on x86-64 and aarch64, and tries them: `make wheels`.

Both are compiled by zig from the sdist, for glibc 2.17, and checked with twine and auditwheel. Each is then installed with numpy
into a place of its own, where every C part must load and give what the Python beside it gives: here as it is, for aarch64 by Debian's
interpreter under `qemu-aarch64-static` (package qemu-user-static), whose packages are fetched with apt and unpacked, not installed.
Everything is in .wheels/, the result in .wheels/dist.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".wheels"
DIST = WORK / "dist"
TOOLS = WORK / "venv" / "bin"
GLIBC = "2.17"
ARCHITECTURES = ("x86_64", "aarch64")
# Debian 12, whose Python is 3.11.
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main\n"
PACKAGES = [
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "zlib1g",
    "libexpat1",
    "libffi8",
    "libssl3",
    "libbz2-1.0",
    "liblzma5",
    "libuuid1",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
]
GLIBCS = ("2_28", "2_27", "2_17")  # what wheels of others, for that interpreter, may be tagged with


def call(*command: object, **environment: str) -> None:
    print("+", *command, flush=True)
    subprocess.run([*map(str, command)], check=True, env={**os.environ, **environment})


def make() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    if not (TOOLS / "twine").exists():
        call(sys.executable, "-m", "venv", WORK / "venv")
        call(TOOLS / "pip", "install", "--quiet", "build", "twine", "auditwheel")
    call(TOOLS / "python", "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    for arch in ARCHITECTURES:
        # pip unpacks the sdist anew each time: nothing compiled for one is taken for the other.
        call(
            *(TOOLS / "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", DIST, sdist),
            ULPSCOPE_ZIG_TARGET=f"{arch}-linux-gnu.{GLIBC}",
        )
    call(TOOLS / "twine", "check", "--strict", *DIST.iterdir())
    for arch in ARCHITECTURES:
        call(TOOLS / "python", "-m", "auditwheel", "show", wheel_for(arch))


def wheel_for(arch: str) -> Path:
    (wheel,) = DIST.glob(f"*-abi3-manylinux_{GLIBC.replace('.', '_')}_{arch}.whl")
    return wheel


def debian() -> Path:
    """The files of an aarch64 interpreter and its libraries."""
    apt, root = WORK / "apt", WORK / "root"
    if (root / "usr/bin/python3.11").exists():
        return root
    for folder in (apt / "lists/partial", apt / "archives/partial", apt / "debs"):
        folder.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(SOURCE)
    settings = {
        **{"APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root"},
        **{"Dir::State": apt, "Dir::State::lists": apt / "lists", "Dir::State::status": apt / "status"},
        **{"Dir::Cache": apt, "Dir::Etc::sourcelist": apt / "sources.list", "Dir::Etc::sourceparts": "-"},
    }
    (apt / "conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    call("apt-get", "--quiet", "update", APT_CONFIG=str(apt / "conf"))
    call("sh", "-c", f'cd "{apt}/debs" && apt-get --quiet download {" ".join(PACKAGES)}', APT_CONFIG=str(apt / "conf"))
    for package in (apt / "debs").glob("*.deb"):
        call("dpkg", "-x", package, root)
    return root


def try_out(arch: str) -> None:
    site = WORK / "site" / arch
    shutil.rmtree(site, ignore_errors=True)
    install = [TOOLS / "pip", "install", "--quiet", "--target", site]
    python: list[object] = [TOOLS / "python"]
    if arch != platform.machine():
        root = debian()
        qemu = shutil.which(f"qemu-{arch}-static")
        if qemu is None:
            raise SystemExit(
                f"the wheel for {arch} is made but not tried: there is no qemu-{arch}-static (Debian: qemu-user-static)"
            )
        python = [qemu, "-L", root, root / "usr/bin/python3.11"]
        install += ["--python-version", "3.11", "--only-binary", ":all:"]
        install += [f"--platform=manylinux_{glibc}_{arch}" for glibc in GLIBCS]
    call(*install, wheel_for(arch))
    call(*python, ROOT / "tools" / "try_wheel.py", arch, PYTHONPATH=str(site))


if __name__ == "__main__":
    make()
    for each in ARCHITECTURES:
        try_out(each)
    print("wheels:", *sorted(path.name for path in DIST.iterdir()), sep="\n  ")
