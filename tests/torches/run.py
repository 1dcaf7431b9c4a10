"""`run.py [VERSION ...] [--newest] [--only NAME,NAME] [--native full|safe|off] [--work DIR] [--keep]`: the programs on other versions of torch.

Each version gets a virtual environment of its own (some gigabytes, removed again unless --keep), this package and its drop-in. Prints what
falls short, then a line a version. Exit code 1 if anything does. `--newest` adds what the registry gives today.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
# One for each minor version that changed something for us.
VERSIONS = ("2.1.0", "2.3.1", "2.4.1", "2.6.0", "2.7.1", "2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
# Dropout is off there, as the manuals say, and these two have some.
_DIFFER_BY_DESIGN = re.compile(r"(encoder|checkpointed) (mix|bare again) CHANGED")


def names():
    source = (HERE / "programs.py").read_text()
    return re.findall(r"\w+", re.search(r"^PROGRAMS = \(([^)]*)\)", source, re.M)[1])


def install(version, folder):
    """The interpreter of a virtual environment with this torch and this package."""
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    if not (folder / "ready").exists():
        old = version != "newest" and tuple(map(int, version.split(".")[:2])) < (2, 3)
        also = ["transformers==4.45.2", "numpy<2"] if old else ["transformers>=4.45,<5"]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([*pip, "torch" if version == "newest" else f"torch=={version}", *also], check=True)
        subprocess.run([*pip, PROJECT, PROJECT / "dropin"], check=True)
        (folder / "ready").touch()
    else:
        subprocess.run([*pip, "--no-deps", "--force-reinstall", PROJECT, PROJECT / "dropin"], check=True)
    return python


def lines(python, name, tool, work):
    command = [python, HERE / "programs.py", name, "--tool", tool]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=work, check=False)
    except subprocess.TimeoutExpired:
        return [f"{name} TIMEOUT"]
    said = [line for line in done.stdout.splitlines() if line.startswith(name + " ")]
    if done.returncode not in (0, 1):
        said.append(f"{name} DIED {done.returncode} {done.stderr.strip().splitlines()[-1:]}")
    return said


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--native", choices=["full", "safe", "off"])
    parser.add_argument("--work", type=Path, default=Path(".torches"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    words = parser.parse_args()
    if words.native:
        os.environ["ULPSCOPE_NATIVE"] = words.native
    work = words.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    table, bad = [], 0
    for version in [*words.versions, *(["newest"] if words.newest else [])]:
        try:
            python = install(version, work / version)
        except subprocess.CalledProcessError as error:
            table.append(f"{version:10} cannot be installed: {error}")
            bad += 1
            continue
        row = []
        for tool in ("ulpscope", "msprobe"):
            with ThreadPoolExecutor(words.jobs) as pool:
                chosen = words.only.split(",") if words.only else names()
                parts = pool.map(lambda name, tool=tool, python=python: lines(python, name, tool, work), chosen)
                said = [line for part in parts for line in part if "cannot run here" not in line]
            fine = [line for line in said if " same " in line or (tool == "msprobe" and _DIFFER_BY_DESIGN.match(line))]
            short = [line for line in said if line not in fine]
            print(*(f"{version} {tool}: {line}" for line in short), sep="\n" if short else "", flush=True)
            row.append(f"{tool} {len(fine)} of {len(said)}")
            bad += bool(short)
        table.append(f"{version:10} {', '.join(row)}")
        if not words.keep:
            shutil.rmtree(work / version, ignore_errors=True)
    print(*table, sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
