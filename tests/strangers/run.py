"""`run.py [NAME ...] [--python PY] [--work DIR] [--keep]`: programs built on libraries that nobody here wrote, unedited.

Each is run bare and recorded (the same result to the last bit), recorded twice (`compare` agrees), judged (`blame` accuses nobody),
and its steps are counted. Without --python a virtual environment is made with what the first lines of the programs ask for.
Prints a line for each, with what falls short; exit code 1 if anything does.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
PROGRAMS = HERE / "programs"
TORCH = "torch==2.13.0"
CHECKS = ("bits", "twice", "blame", "steps")
# There is no build of these for the CPU alone: a library that wants one does without.
_UNUSABLE = ("torchvision", "torchaudio")
_COUNT = "import sys, ulpscope; print(len({dump.manifest.step for dump in ulpscope.open_run(sys.argv[1])}))"


def names():
    return sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "ending")


def told(name, word):
    """What the first lines of a program say."""
    return re.search(rf"^# {word}: (.*)$", (PROGRAMS / f"{name}.py").read_text(), re.M)[1].split()


def install(folder, chosen):
    """The interpreter of a virtual environment with what these programs need, and this package."""
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([*pip, TORCH], check=True)
    only = folder / "constraints.txt"
    only.write_text(TORCH + "\n")
    for need in sorted({need for name in chosen for need in told(name, "needs")}):
        subprocess.run([*pip, "-c", only, need], check=True)
    subprocess.run([*pip, PROJECT], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *_UNUSABLE], check=True, capture_output=True)
    return python


class Trial:
    """One program with one interpreter, in a folder of its own."""

    def __init__(self, name, python, work):
        self.program = [python, "-W", "ignore", PROGRAMS / f"{name}.py"]
        self.name, self.python, self.work = name, python, work
        self.command = Path(python).with_name("ulpscope")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)

    def run(self, *words, limit=600):
        known = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            return subprocess.run(words, cwd=self.work, env=known, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(words, 124, "", f"no end after {limit} s")

    def result(self, done):
        found = re.findall(r"^RESULT.*$", done.stdout, re.M)
        return found[0] if found and not done.returncode else f"exit {done.returncode}: {done.stderr.strip()[-200:]}"

    def record(self, folder):
        return self.run(self.command, "capture", "-o", folder, "--level", "mix", "--", *self.program)

    def bits(self):
        bare, again = self.result(self.run(*self.program)), self.result(self.run(*self.program))
        if bare != again or not bare.startswith("RESULT"):
            return f"not the same twice without us: {bare}, {again}"
        recorded = self.result(self.record("one"))
        return None if recorded == bare else f"{bare} bare, {recorded} recorded"

    def twice(self):
        self.record("two")
        done = self.run(self.command, "compare", "one", "two")
        return done.returncode and f"exit {done.returncode}: " + " ".join(
            re.findall(r"✗.*|.*incomplete.*|error.*", done.stdout + done.stderr)[:2]
        )

    def blame(self):
        done = self.run(self.command, "blame", "--", *self.program)
        return done.returncode and f"exit {done.returncode}: " + " ".join(
            re.findall(r"introduced by.*|why .*|error.*", done.stdout + done.stderr)[:2]
        )

    def steps(self):
        (wanted,) = told(self.name, "steps")
        found = self.run(self.python, "-c", _COUNT, "one").stdout.strip()
        return None if wanted in ("*", found) else f"{found} steps, not {wanted}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--python", type=Path)
    parser.add_argument("--work", type=Path, default=Path(".strangers"))
    parser.add_argument("--keep", action="store_true")
    words = parser.parse_args()
    chosen = words.names or names()
    work = words.work.resolve()
    python = words.python.absolute() if words.python else install(work / "venv", chosen)
    short = dict.fromkeys(CHECKS, 0)
    for name in chosen:
        trial = Trial(name, python, work / name)
        said = {check: getattr(trial, check)() for check in CHECKS}
        for check, what in said.items():
            short[check] += bool(what)
        print(name, *(f"{check} {what or 'ok'}" for check, what in said.items()), sep="\n    ", flush=True)
        if not words.keep:
            shutil.rmtree(trial.work, ignore_errors=True)
    print(*(f"{check}: {len(chosen) - short[check]} of {len(chosen)}" for check in CHECKS), sep="\n")
    return any(short.values())


if __name__ == "__main__":
    sys.exit(main())
