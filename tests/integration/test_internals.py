"""What torch lacks that is not public: the run is as it is without us, or refused before anything was done."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ulpscope.frameworks.torch import internals

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "torches" / "programs.py"
SOURCE = Path(internals.__file__)

# Runs each program in a child of a process that has torch already, without one of its names: torch is slow to import.
CHILDREN = """
import os, sys, tempfile
sys.path.insert(0, {programs!r})
import torch, programs
torch.set_num_threads(1)
for path in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 70
        try:
            import warnings, logging
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            try:
                programs.without(path)
            except TypeError:
                print(path, "cannot run: a class of C keeps its attributes")
                os._exit(sys.stdout.flush() or 0)
            for name in ("mlp", "functional"):
                program = dict((each.__name__, each) for each in programs.PROGRAMS)[name]
                try:
                    bare = programs.run(program)
                except Exception:
                    print(path, name, "cannot run")  # torch itself needs it
                    continue
                sys.stdout.write(path + " ")
                programs.check(name, program, bare, "ulpscope", ("mix", "kernel", "bare again"))
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        print(path, "DIED")
"""


# `register_hook` of a node, which is public, calls it: without it no hook can be hung by anybody.
OF_TORCH_ITSELF = {"torch.autograd.function._HookMixin._register_hook"}


def names_asked() -> list[str]:
    """Every name of torch that `internals` asks for."""
    texts = {node.value for node in ast.walk(ast.parse(SOURCE.read_text())) if isinstance(node, ast.Constant)}
    found = {text for text in texts if isinstance(text, str) and re.fullmatch(r"torch(\.\w+)+", text)}
    return sorted(found)


def _is_there(path: str) -> bool:
    return internals._found(path) is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_without_any_name_a_run_is_the_same_or_refused() -> None:
    names = [name for name in names_asked() if _is_there(name) and name not in OF_TORCH_ITSELF]
    assert len(names) > 30
    script = CHILDREN.format(programs=str(PROGRAMS.parent))
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in lines if line.startswith("torch.")} == set(names), done.stderr
    wrong = [line for line in lines if not re.search(r" (same|REFUSED|cannot run)\b", line)]
    assert not wrong, "\n".join(wrong)
    assert sum(" same " in line for line in lines) > len(names), "most are not needed"


def test_supported_versions_are_said_from_one_place() -> None:
    oldest, newest = (".".join(map(str, each)) for each in (internals.OLDEST, internals.NEWEST))
    assert f'torch = ["torch>={oldest}"]' in (ROOT / "pyproject.toml").read_text()
    for page in ("README.md", "docs/guide.md"):
        assert f"torch {oldest} to {newest}" in (ROOT / page).read_text(), page
    tried = re.search(r"^VERSIONS = \(([^)]*)\)", (ROOT / "tests" / "torches" / "run.py").read_text(), re.M)
    assert tried is not None
    versions = re.findall(r'"(\d+\.\d+)\.', tried[1])
    assert (versions[0], versions[-1]) == (oldest, newest)


def test_a_torch_that_nobody_tried_is_asked_through_python_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0+cpu")
    monkeypatch.setattr(internals, "_said", set())
    assert internals.native() == "safe"
    internals.check()
    internals.check()
    assert [record.message for record in caplog.records if "9.9.0" in record.message] == [
        "torch 9.9.0+cpu is not one that this ulpscope is tested with (torch 2.1 to 2.15): "
        "its library is asked through Python alone (ULPSCOPE_NATIVE=safe)"
    ]
