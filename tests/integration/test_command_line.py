"""The command line as a person uses it: real processes, real exit codes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import ulpscope
from builders import DumpBuilder
from ulpscope.cli.main import cli, main
from ulpscope.compat.msprobe.command import main as msprobe
from ulpscope.compat.ptdbg_ascend.shell import main as parse
from ulpscope.model.names import call_text

TRAIN = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(3, 4)
for step in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), torch.tensor([0, 1, 1]))
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
INFER = """
import torch
small, large = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 4))
with torch.no_grad():
    for step in range(3):
        large(small(torch.ones(1, 4)))
"""


def run(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ulpscope", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_a_script_is_recorded_without_an_edit_and_prints_what_it_would(tmp_path: Path, script: Path) -> None:
    bare = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    done = run("capture", "-o", tmp_path / "run", "--level", "mix", "--", sys.executable, script)
    assert (done.returncode, done.stdout) == (0, bare.stdout)
    assert "recorded" in done.stderr
    assert "3 steps, 1 rank" in done.stderr
    dumps = ulpscope.open_run(tmp_path / "run")
    assert [dump.manifest.step for dump in dumps] == [0, 1, 2]
    for dump in dumps:
        names = {call_text(call) for call in dump.ids()}
        assert {"Module.0.Linear.forward.0", "Functional.linear.0.backward", "Optimizer.SGD.step.0"} <= names
        assert dump.ending == "complete"


def test_building_a_model_is_not_recorded(tmp_path: Path, script: Path) -> None:
    run("capture", "-o", tmp_path / "run", "--", sys.executable, script)
    kinds = {call.kind for call in ulpscope.open_dump(tmp_path / "run").ids()}
    assert "Init" not in kinds


def test_without_an_optimizer_a_step_is_a_forward_of_the_largest_model(tmp_path: Path) -> None:
    (tmp_path / "infer.py").write_text(INFER)
    done = run(
        "capture",
        "-o",
        tmp_path / "run",
        "--level",
        "module",
        "--steps",
        "1:2",
        "--",
        sys.executable,
        tmp_path / "infer.py",
    )
    assert done.returncode == 0
    dumps = ulpscope.open_run(tmp_path / "run")
    assert [dump.manifest.step for dump in dumps] == [1, 2]
    assert [sum(call.name.endswith("Sequential") for call in dump.ids()) for dump in dumps] == [1, 1]


PREPARED = """
import torch
class Normalize(torch.nn.Module):
    def forward(self, x):
        return x.sub(0.5).div(0.5)
normalize = Normalize()
batch = torch.stack([normalize(torch.ones(4)) for _ in range(50)])
"""
EVALUATION = """
    with torch.no_grad():
        for _ in range(2):
            model(x)
"""


def test_show_names_what_each_step_did_and_an_evaluation_changes_no_number(tmp_path: Path) -> None:
    (tmp_path / "evaluated.py").write_text(PREPARED + TRAIN + EVALUATION)
    run("capture", "-o", tmp_path / "run", "--", sys.executable, tmp_path / "evaluated.py")
    dumps = ulpscope.open_run(tmp_path / "run")
    counts = {"training": 1, "evaluation": 2}
    assert [dump.manifest.stretches for dump in dumps] == [{"preparation": 50, **counts}, counts, counts]
    shown = run("show", tmp_path / "run")
    assert [line.split("complete")[1].split() for line in shown.stdout.splitlines() if "complete" in line] == [
        ["preparation", "50,", "training", "1,", "evaluation", "2"],
        ["training", "1,", "evaluation", "2"],
        ["training", "1,", "evaluation", "2"],
    ]
    told = json.loads(run("show", tmp_path / "run", "--format", "json").stdout)
    assert told["dumps"][1]["stretches"] == counts


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
        ("1/0", 1),
    ],
)
def test_the_exit_code_is_that_of_the_program(tmp_path: Path, program: str, code: int) -> None:
    assert run("capture", "-o", tmp_path / "run", "--", sys.executable, "-c", program).returncode == code


LOOK = "import sys; print(sorted(m for m in sys.modules if m.startswith(('torch', 'numpy'))))"


@pytest.mark.parametrize(("words", "code"), [((), 4), (("-q",), 4), (("--allow-empty",), 0)])
def test_a_program_without_torch_is_left_alone_and_an_empty_run_has_an_exit_code_of_its_own(
    words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    done = run("capture", "-o", tmp_path / "run", *words, "--", sys.executable, "-c", LOOK)
    assert (done.stdout.strip(), done.returncode) == ("[]", code)
    assert "nothing was recorded; no Python process below the command called torch" in done.stderr
    assert not (tmp_path / "run").exists()


def test_where_no_asked_step_came_that_is_said(tmp_path: Path, script: Path) -> None:
    done = run("capture", "-o", tmp_path / "run", "--steps", "77", "--", sys.executable, script)
    assert done.returncode == 4
    assert "none came to a step and a rank that were asked for" in done.stderr


def test_where_no_call_was_left_of_what_was_asked_for_that_is_said(tmp_path: Path) -> None:
    done = run("capture", "-o", tmp_path / "run", "--only", "relvu", "--", sys.executable, "-c", INFER)
    assert done.returncode == 4
    assert "nothing was recorded" in done.stderr and "nothing matched 'relvu'" in done.stderr


ASKS_FIRST = """
import importlib.util, sys, threading
for _ in range(3):
    spec = importlib.util.find_spec("torch")
    print(type(spec.loader).__name__, "torch" in sys.modules)
threads = [threading.Thread(target=__import__, args=("torch",)) for _ in range(4)]
[each.start() for each in threads], [each.join() for each in threads]
import torch
print(type(torch.__spec__.loader).__name__, vars(torch.__spec__.loader).keys())
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
"""
VERBS = {
    "capture": (("capture", "-o", "run"), "recorded"),
    "overflow": (("check", "overflow"), "no call overflowed"),
    "noise": (("check", "noise"), "and rounding explain"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_program_that_asks_whether_there_is_torch_before_it_imports_it_is_seen(verb: str, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS_FIRST)
    words, says = VERBS[verb]
    done = run(*words, "--", sys.executable, "asks.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout + done.stderr
    if verb == "capture":
        bare = subprocess.run([sys.executable, "asks.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == bare.stdout
        names = {call_text(call) for call in ulpscope.open_dump(tmp_path / "run").ids()}
        assert {"Functional.linear.0.forward", "Functional.linear.0.backward"} <= names


ENDS = {
    "a signal": "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(); os.kill(os.getpid(), 11)",
    "an error": "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(); raise SystemExit(5)",
    "nothing": "",
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("check", ["overflow", "noise"])
def test_a_check_of_a_program_that_was_cut_or_did_nothing_does_not_say_that_nothing_is_wrong(
    check: str, how: str, tmp_path: Path
) -> None:
    command = (sys.executable, "-c", f"import os, torch; {ENDS[how]}")
    done = run("check", check, *(("-n", "-1") if check == "overflow" else ()), "--", *command, cwd=tmp_path)
    assert done.returncode == (4 if how == "nothing" else 3), done.stdout + done.stderr
    says = {
        "a signal": "was ended by signal 11 (SIGSEGV)",
        "an error": "ended with exit code 5",
        "nothing": "nothing to check",
    }
    assert says[how] in done.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    command = [
        "capture",
        "-o",
        str(tmp_path / "a" / "run"),
        "--",
        sys.executable,
        "-c",
        f"open({str(tmp_path / 'ran')!r}, 'w')",
    ]
    found = CliRunner().invoke(cli, command)
    assert "is not writable; choose another folder with -o" in f"{found.output}{found.exception}"
    assert not (tmp_path / "ran").exists()


def test_who_asks_for_it_is_refused_before_the_command_runs_where_there_is_no_room(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [sys.executable, "-m", "ulpscope", "capture", "-o", "run", "--strict", "--", "touch", "ran"]
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot reserve 8 MB in" in done.stderr and "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\nimport torch\n1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run("capture", "-o", tmp_path / "run", "--", sys.executable, "-c", "import torch; torch.sin(torch.ones(1))")
    assert done.stdout.split() == ["mine", "mine"]  # in our process, and in the program's
    assert done.stderr.count("ZeroDivisionError") == 2
    assert "Torch.sin.0.forward" in [call_text(call) for call in ulpscope.open_dump(tmp_path / "run").ids()]


def test_forked_children_are_recorded_each_in_a_folder_of_its_own(tmp_path: Path) -> None:
    program = """
import multiprocessing, torch
def work(n): torch.full((n,), 1.0)
if __name__ == "__main__":
    torch.sin(torch.ones(1))
    children = [multiprocessing.get_context("fork").Process(target=work, args=(n,)) for n in (5, 6)]
    for child in children: child.start()
    for child in children: child.join()
"""
    (tmp_path / "forks.py").write_text(program)
    done = run("capture", "-o", tmp_path / "run", "--", sys.executable, tmp_path / "forks.py")
    assert done.returncode == 0, done.stderr
    found = {dump.folder.name: [call_text(call) for call in dump.ids()] for dump in ulpscope.open_run(tmp_path / "run")}
    assert "Torch.sin.0.forward" in found["rank0"]
    assert sum("Torch.full.0.forward" in names for names in found.values()) == 2


def test_an_earlier_run_is_refused_and_replaced_on_demand(tmp_path: Path, script: Path) -> None:
    words = ("capture", "-o", tmp_path / "run", "-q")
    assert run(*words, "--", sys.executable, script).returncode == 0
    again = run(*words, "--", sys.executable, script)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    assert run(*words, "--overwrite", "--steps", "0", "--", sys.executable, script).returncode == 0
    assert len(ulpscope.open_run(tmp_path / "run")) == 1


def test_options_may_come_from_a_file_and_mistakes_in_it_are_told_at_once(tmp_path: Path, script: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"level": "module", "steps": [1]}))
    assert run("capture", "-o", tmp_path / "run", "--config", config, "--", sys.executable, script).returncode == 0
    assert ulpscope.open_dump(tmp_path / "run").manifest.level == "module"
    config.write_text(json.dumps({"levle": "module", "steps": "x"}))
    done = run("capture", "-o", tmp_path / "other", "--config", config, "--", sys.executable, script)
    assert done.returncode == 2
    assert "unknown key 'levle'. Did you mean 'level'?" in done.stderr
    assert "2 problems, nothing was done" in done.stderr


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = run("capture", "-o", tmp_path / "run", "--", "no-such-command")
    assert done.returncode == 2
    assert "cannot run no-such-command: No such file or directory" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"), [(("captrue",), "Did you mean 'capture'"), (("show",), "Missing argument 'RUN'")]
)
def test_a_misspelt_verb_or_a_missing_word_is_a_usage_error(words: tuple[str, ...], says: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert says in done.stderr


def test_show_lists_calls_and_one_call_with_its_stack(tmp_path: Path, script: Path) -> None:
    run("capture", "-o", tmp_path / "run", "--level", "mix", "--tensors", "--checksum", "--", sys.executable, script)
    listed = run("show", tmp_path / "run").stdout
    assert "Functional.linear.0.forward" in listed
    assert "f32[3, 4] f32[8, 4] f32[8] -> f32[3, 8]" in listed
    one = run("show", tmp_path / "run", "Functional.linear.0.forward", "--step", "1").stdout
    assert "train.py:9 in <module>" in one
    assert "loss = F.cross_entropy(model(x), torch.tensor([0, 1, 1]))" in one
    assert "crc " in one
    some = run("show", tmp_path / "run", "linear", "--phase", "backward").stdout
    assert {line.split()[1] for line in some.splitlines()} == {
        f"{name}.{number}"
        for name, number in (
            ("Functional.linear", "0.backward"),
            ("Functional.linear", "1.backward"),
            ("Module.0.Linear.backward", "0"),
            ("Module.2.Linear.backward", "0"),
        )
    }


def test_show_gives_the_same_bytes_of_json_each_time(tmp_path: Path, script: Path) -> None:
    run("capture", "-o", tmp_path / "run", "--", sys.executable, script)
    first = run("show", tmp_path / "run", "--format", "json", "--limit", "0").stdout
    assert first == run("show", tmp_path / "run", "--format", "json", "--limit", "0").stdout
    content = json.loads(first)
    linear = next(call for call in content["calls"] if call["name"] == "Functional.linear.0.forward")
    assert linear["values"][0]["shape"] == [3, 4]
    assert {"max", "min", "mean", "norm", "nan", "inf", "zero"} <= set(linear["values"][0]["stats"])


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("show", "nowhere"), 3, "nowhere does not exist"),
        (("show", "."), 3, "holds no dump"),
    ],
)
def test_what_cannot_be_read_is_exit_code_3(tmp_path: Path, words: tuple[str, ...], code: int, says: str) -> None:
    done = run(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr


@pytest.mark.distributed
def test_torchrun_gives_a_folder_for_each_rank(tmp_path: Path) -> None:
    program = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((2,), float(dist.get_rank()))
dist.all_reduce(x)
dist.destroy_process_group()
"""
    (tmp_path / "ranks.py").write_text(program)
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "ranks.py")
    done = run("capture", "-o", tmp_path / "run", "--", sys.executable, *words)
    assert done.returncode == 0, done.stderr
    dumps = ulpscope.open_run(tmp_path / "run")
    assert [(dump.manifest.rank, dump.manifest.world_size) for dump in dumps] == [(0, 2), (1, 2)]
    for dump in dumps:
        output = dump.call("Distributed.all_reduce.0.forward").values[-1]
        assert output.stats is not None
        assert output.stats.max == 1.0


def two_runs(folder: Path) -> tuple[Path, Path]:
    """Two runs that differ."""
    for side in ("a", "b"):
        builder = DumpBuilder(folder / side)
        for index in range(3000):
            builder.call("Torch", "mul", index, values={("output", 0): np.full(3, index + (side == "b"), np.float32)})
        builder.close()
    return folder / "a", folder / "b"


@pytest.mark.parametrize("words", [["compare", "a", "b"], ["show", "a"], ["convert", "a", "c"], ["blame", "a", "b"]])
def test_what_nobody_expected_is_one_line_and_never_the_exit_code_of_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    two_runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(np, "argsort", lambda *given, **more: 1 / 0)  # a library that breaks under us
    for variable, lines in (("", 1), ("1", 6)):
        monkeypatch.setenv("ULPSCOPE_TRACEBACK", variable)
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr().err.strip()
        assert ended.value.code == 70
        assert "ZeroDivisionError: division by zero" in said
        assert (len(said.splitlines()) == 1) if lines == 1 else (len(said.splitlines()) > lines)
        assert ("Traceback" in said) is (variable == "1")


def test_the_older_command_lines_never_end_with_a_traceback_either(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b = two_runs(tmp_path)
    np.save(tmp_path / "x.npy", np.ones(3))
    asked = tmp_path / "compare.json"
    asked.write_text(json.dumps({"npu_path": str(a), "bench_path": str(b)}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(np, "argsort", lambda *given, **more: 1 / 0)
    monkeypatch.setattr(np, "frombuffer", lambda *given, **more: 1 / 0)
    assert msprobe(["-f", "pytorch", "compare", "-i", str(asked), "-o", "out"]) == 70
    assert "ZeroDivisionError" in caplog.records[-1].getMessage() and "\n" not in caplog.records[-1].getMessage()
    assert parse(["cn", "-m", "x.npy", "-g", "x.npy"]) == 70
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and "Traceback" not in said


def test_a_reader_that_leaves_early_is_not_an_answer(tmp_path: Path) -> None:
    a, _ = two_runs(tmp_path)
    command = [sys.executable, "-m", "ulpscope", "show", str(a), "--limit", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        said = child.stderr.read()
    assert (child.returncode, said) == (141, b"")


def test_ctrl_c_is_not_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    a, b = two_runs(tmp_path)
    monkeypatch.setattr(np, "argsort", pressed)
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(a), str(b)])
    assert ended.value.code == 130
    assert "Traceback" not in capsys.readouterr().err
