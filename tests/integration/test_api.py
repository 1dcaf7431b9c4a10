"""What verbs do, from Python: the examples of the page run, and answers are data that say all that the commands say."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ulpscope
from ulpscope import CaptureError, ConfigError, DumpError, api

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
y = torch.exp(model(torch.ones(2, 4)).abs() + 1000)
print("loss", float(y.sum()))
"""


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def command(folder: Path, text: str = TRAIN) -> list[str]:
    (folder / "train.py").write_text(text)
    return [sys.executable, str(folder / "train.py")]


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    command(tmp_path)
    found = examples()
    assert len(found) >= 4
    for example in [
        *found[1:],
        found[0].replace('"python"', "sys.executable").replace("import ulpscope", "import sys, ulpscope"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, (example, done.stderr)
    assert done.stdout == "0 Torch.exp.0.forward normal\n"


def test_every_function_of_the_page_is_there_and_documented() -> None:
    table = set(re.findall(r"`(\w+)\(", PAGE.read_text(encoding="utf-8"))) & set(api.__all__)
    functions = {name for name in api.__all__ if name.islower()}
    assert functions <= table, functions - table
    assert all(getattr(api, name).__doc__ for name in api.__all__)


def test_the_first_use_of_api_brings_no_torch() -> None:
    code = (
        "import sys, ulpscope\nfor name in ulpscope.api.__all__: getattr(ulpscope.api, name)\n"
        "assert 'torch' not in sys.modules and 'click' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_overflow_is_data_and_what_the_program_prints_is_not_ours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = api.check_overflow(command=command(tmp_path), number=-1, output=tmp_path / "kept")
    out, err = capfd.readouterr()
    assert out == "" and "loss" in err
    assert [ulpscope.call_text(each.call.id) for each in found.overflows] == ["Torch.exp.0.forward"]
    assert (found.exit_code, found.ended, found.seen) == (1, 0, True)
    again = api.check_overflow(tmp_path / "kept")
    assert [each.call for each in again.overflows] == [each.call for each in found.overflows]


def test_a_command_runs_from_a_thread_too(tmp_path: Path) -> None:
    found: list[api.NoiseCheck] = []
    words = command(tmp_path, "print(1)")
    thread = threading.Thread(target=lambda: found.append(api.check_noise(words)))
    thread.start()
    thread.join()
    assert (found[0].rows, found[0].seen, found[0].exit_code) == ((), False, 4)


def test_two_runs_and_what_they_come_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, words in (("a", TRAIN), ("b", TRAIN.replace("1000", "1"))):
        assert api.record(command(tmp_path, words), tmp_path / name, level="mix", tensors=True) == 0
    capfd.readouterr()
    outcome = api.compare(tmp_path / "a", tmp_path / "b", tables="csv", output=tmp_path / "out")
    assert (outcome.answer.exit_code, outcome.reference) == (1, str(tmp_path / "a"))
    assert [path.name for unit in outcome.units for path in unit.artefacts] == ["compare_step0_rank0.csv"]
    blamed = api.blame(tmp_path / "b", tmp_path / "a")
    assert (blamed.where, blamed.steps, blamed.ranks, blamed.exit_code) == (tmp_path / "b", 1, 1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out", "train.py"]
    assert capfd.readouterr() == ("", "")


def test_a_program_is_judged_as_it_runs(tmp_path: Path) -> None:
    found = api.blame(command=command(tmp_path, TRAIN.replace("1000", "1")), output=tmp_path / "ledger")
    assert (found.exit_code, found.ended, found.judgement.first) == (0, 0, None) and found.calls > 2
    assert api.blame(tmp_path / "ledger").calls == found.calls


def test_a_command_that_fails_is_told_in_the_answer(tmp_path: Path) -> None:
    found = api.check_overflow(command=command(tmp_path, "raise SystemExit(7)"))
    assert (found.ended, found.seen, found.exit_code) == (7, False, 3)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: api.blame(), ConfigError, "needs a target or a command"),
        (lambda: api.compare("a", "b", align="nam"), ConfigError, "Did you mean 'name'"),
        (lambda: api.compare("missing", "b"), DumpError, "missing does not exist"),
        (lambda: api.check_overflow(), ConfigError, "needs a command"),
        (lambda: api.convert("missing", "to"), DumpError, "missing does not exist"),
        (lambda: api.convert("missing", "to", to="msprob"), ConfigError, "Did you mean 'msprobe'"),
        (lambda: api.rerun("missing", "Torch.mul.0.forward", precision="fp65"), ConfigError, "Did you mean 'fp64'"),
        (lambda: api.record(["no-such-program"], "run"), CaptureError, "cannot run no-such-program"),
        (lambda: api.record(["true"], "run", levle="op"), ConfigError, "level"),
    ],
)
def test_what_cannot_be_done_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: object, error: type[Exception], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        call()  # type: ignore[operator]
