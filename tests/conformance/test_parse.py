"""The parse shell of ptdbg_ascend, as the last chapter of its guide shows it. Each test carries the ids of its rows.

Kernel dumps are written by hand (`cann_files`), so that no vendor tool is needed, as none is by the shell.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cann_files import MOMENT, Stored, file_name, to_nc1hwc0, write_kernel
from ulpscope.compat.ptdbg_ascend.shell import PROMPT, completions, main, run_line

ROOT = Path(__file__).resolve().parents[2]
ADD = "Add.fp32_vars_add_1fp32_vars_Relu_6"
API = "Functional_conv2d_0_forward"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Shell:
    """One command of the shell in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str, code: int = 0) -> str:
        """Everything it prints."""
        assert run_line(line) == code
        captured = self._capsys.readouterr()
        return captured.out + captured.err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'dropin'}",
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
    }


def started(*words: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m ptdbg_ascend.parse` as a process, with lines to read."""
    return subprocess.run(
        [sys.executable, "-m", "ptdbg_ascend.parse", *words],
        input=lines,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def kernels(folder: str, last: float = 4.0) -> Path:
    """A folder with one kernel: two inputs and an output in the layout of the device."""
    x = np.array([1, 2, 3, last], dtype=np.float16).reshape(1, 4, 1, 1)
    folded = Stored(to_nc1hwc0(x), "NC1HWC0", origin=x.shape)
    op_type, _, op_name = ADD.partition(".")
    return write_kernel(Path(folder), [folded, Stored(x)], [folded], op_type=op_type, op_name=op_name)


def only(folder: str) -> Path:
    (found,) = Path(folder).iterdir()
    return found


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def saved(name: str, values: Any, dtype: str = "float32") -> str:
    np.save(name, np.asarray(values, dtype=dtype))
    return name


# --- the shell --------------------------------------------------------------------------------------------------


def test_000_128_the_prompt_runs_commands_of_ours_and_of_the_system() -> None:
    saved("a.npy", [1, 2])
    done = started(lines="echo from the shell\npt -n a.npy\n\nexit\necho never\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(PROMPT) == 4
    assert "from the shell" in done.stdout and "[Shape: (2,)]" in done.stdout and "never" not in done.stdout


def test_000_128_one_command_can_be_given_with_the_start() -> None:
    saved("a.npy", [1, 2])
    done = started("pt", "-n", "a.npy")
    assert (done.returncode, PROMPT in done.stdout) == (0, False)
    assert "[Shape: (2,)]" in done.stdout
    assert started("pt", "-n", "no.npy").returncode == 3


def test_000_128_starting_it_takes_no_framework() -> None:
    check = "import sys, ptdbg_ascend.parse; print(sorted({'torch', 'mindspore'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Console:
    """The shell on a terminal of its own."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self._printed = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ptdbg_ascend.parse"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(),
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(slave)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def until(self, text: str) -> str:
        """What is printed up to a text, that included."""
        limit = time.monotonic() + 60
        while text not in self._printed:
            assert time.monotonic() < limit, f"no {text!r} in {self._printed!r}"
            if select.select([self._master], [], [], 1)[0]:
                self._printed += os.read(self._master, 4096).decode(errors="replace")
        before, _, self._printed = self._printed.partition(text)
        return before + text

    def leave(self) -> int:
        """Ctrl+C until it leaves: what is typed while the prompt is being set up may be thrown away by the terminal."""
        for _ in range(30):
            self.type("\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(1)
        raise AssertionError("Ctrl+C did not leave the prompt")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())


def _own_terminal() -> None:
    import fcntl
    import signal
    import termios

    # A shell that starts tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_000_128_ctrl_c_leaves_tab_completes_and_lines_are_remembered() -> None:
    saved("array.npy", [1, 2])
    with Console() as console:
        console.until(PROMPT)
        console.type("pt -n arr\t\n")
        assert "[Shape: (2,)]" in console.until("TextFile:array.npy.txt")
        console.until(PROMPT)
        console.type("hist\t\n")
        assert "pt -n array.npy" in console.until("2  history")
        console.until(PROMPT)
        # Ctrl+C stops a command that runs, and leaves from the prompt.
        console.type("echo begun; sleep 60\n")
        console.until("begun\r\n")
        console.type("\x03")
        console.until("stopped")
        console.until(PROMPT)
        assert console.leave() == 0


def test_000_128_words_complete_to_commands_options_and_paths() -> None:
    Path("dump_data").mkdir()
    saved("dump.npy", [1])
    assert completions("v", "v") == ["vc"]
    assert completions("cn -", "-") == ["-al", "-g", "-m", "-p", "-rl", "-s"]
    assert completions("dc -o", "-o") == ["-out"]
    assert completions("pt -n dump", "dump") == ["dump.npy", "dump_data/"]


def test_000_128_other_lines_go_to_the_system_and_what_it_does_not_know_is_told(shell: Shell) -> None:
    saved("a.npy", [1])
    Path("inner").mkdir()
    assert run_line("ls -d inner > listed") == 0 and Path("listed").read_text() == "inner\n"
    assert "no command 'nosuchcommand'. Commands: vc, dc, pt, pk, cn" in shell("nosuchcommand -x", code=127)
    shell("cd inner")
    assert "[Shape: (1,)]" in shell("pt\t-n  ../a.npy")
    assert "No such file" in shell("cd nowhere", code=1)
    for word in ("help", "?"):
        assert all(f"  {name} -" in shell(word) for name in ("vc", "dc", "pt", "pk", "cn"))
    assert "cannot be read" in shell("pt -n 'a", code=2)
    assert "arguments are required: -n" in shell("pt", code=2)
    assert main(["vx"]) == 2 and main(["--help"]) == 0


# --- vc ---------------------------------------------------------------------------------------------------------


def test_000_129_vc_compares_two_folders_of_kernel_dumps(shell: Shell) -> None:
    kernels("my_dump_path", 5.0)
    kernels("golden_data_path")
    text = shell("vc -m ./my_dump_path -g ./golden_data_path")
    found = only("parse_data/compare_result")
    assert re.fullmatch(r"result_\d{14}\.csv", found.name)
    assert f'[INFO] The comparison result have been written to "./{found}".' in text
    assert re.search(r"\[INFO\] The command was completed and took \d+ seconds\.", text)
    assert text.endswith("[INFO] Compare finished!!\n")
    rows = rows_of(found)
    name = ADD.partition(".")[2]
    assert [row["TensorIndex"] for row in rows] == [f"{name}:input:0", f"{name}:input:1", f"{name}:output:0"]
    assert [row["MaxAbsoluteError"] for row in rows] == ["1.000000"] * 3
    assert (rows[2]["OpType"], rows[2]["Shape"]) == ("Add", "[1, 4, 1, 1]")


def test_000_129_134_vc_out_must_exist_and_asc_is_accepted_and_said_to_be_unused(shell: Shell) -> None:
    kernels("my")
    kernels("golden")
    assert "-out there is no folder" in shell("vc -m my -g golden -out there", code=2)
    Path("there").mkdir()
    text = shell("vc -m my -g golden -out there -asc /opt/msaccucmp.py")
    assert "-asc is not used" in text
    assert only("there").name.startswith("result_")
    assert not Path("parse_data").exists()
    assert "my/no is no folder" in shell("vc -m my/no -g golden", code=3)


def test_000_129_vc_names_a_corrupt_file_and_compares_the_others(shell: Shell) -> None:
    kernels("my")
    kernels("golden")
    bad = Path("my") / file_name(op_name="bad", moment=MOMENT + 1)
    bad.write_bytes(b"\xff" * 30)
    text = shell("vc -m my -g golden", code=3)
    assert f"[WARNING] bad was not compared: {bad}" in text
    rows = rows_of(only("parse_data/compare_result"))
    assert [row["CosineSimilarity"] for row in rows] == ["1.000000"] * 3 + ["NaN"]
    assert str(bad) in rows[3]["CompareFailReason"]


def test_000_129_vc_takes_folders_of_arrays(shell: Shell) -> None:
    for side in ("my", "golden"):
        Path(side).mkdir()
        saved(f"{side}/Torch_add_0_forward_output.0.npy", [1, 2])
    shell("vc -m my -g golden")
    (row,) = rows_of(only("parse_data/compare_result"))
    assert (row["NPUDump"], row["CosineSimilarity"]) == ("Torch_add_0_forward_output.0", "1.000000")


# --- dc ---------------------------------------------------------------------------------------------------------


def test_000_130_dc_converts_a_folder_as_in_example_1(shell: Shell) -> None:
    dump = kernels("dump_data")
    text = shell("dc -n ./dump_data/")
    lines = [line.strip("│ ") for line in text.splitlines() if line.startswith("│")]
    names = [f"{dump.name}.{slot}.npy" for slot in ("input.0", "input.1", "output.0")]
    assert lines == ["SrcFile: ./dump_data/", *(f"- {name}" for name in names)]
    assert text.splitlines()[0][0] + text.splitlines()[0][-1] == "╭╮"
    assert sorted(path.name for path in Path("parse_data/convert_result").iterdir()) == names
    assert np.load(f"parse_data/convert_result/{names[2]}").shape == (1, 1, 1, 1, 16)
    # A second time, for one file alone: the same arrays again.
    assert "SrcFile: dump_data/" in shell(f"dc -n {dump}")


def test_000_130_134_dc_converts_the_format_and_writes_where_it_is_told(shell: Shell) -> None:
    dump = kernels("dump_data")
    Path("out").mkdir()
    text = shell(f"dc -n {dump} -f nhwc -out out -asc x", code=3)
    assert "-asc is not used" in text
    assert f"{dump}: input.1 of layout ND" in text
    assert np.load(f"out/{dump.name}.output.0.1x1x1x4.npy").reshape(-1).tolist() == [1, 2, 3, 4]
    assert len(list(Path("out").iterdir())) == 2
    assert "Did you mean 'NCHW'" in shell(f"dc -n {dump} -f NCWH", code=2)
    assert "-out nowhere is no folder" in shell(f"dc -n {dump} -out nowhere", code=2)


def test_000_130_dc_names_a_corrupt_file_and_converts_the_others(shell: Shell) -> None:
    kernels("dump_data")
    (Path("dump_data") / file_name(op_name="bad")).write_bytes(b"\xff" * 30)
    text = shell("dc -n dump_data", code=3)
    assert f"[WARNING] skipped: dump_data/{file_name(op_name='bad')}" in text
    assert len(list(Path("parse_data/convert_result").iterdir())) == 3
    Path("empty").mkdir()
    assert "holds no kernel dump" in shell("dc -n empty", code=3)


# --- pt ---------------------------------------------------------------------------------------------------------


def test_000_131_pt_shows_an_array_and_saves_it_as_text(shell: Shell) -> None:
    saved("x.npy", [[1.5, -2.25], [0, 452]], "float16")
    assert shell("pt -n ./x.npy").splitlines() == [
        "[Shape: (2, 2)] [Dtype: float16] [Max: 452.0] [Min: -2.25] [Mean: 112.8]",
        "Path: ./x.npy",
        "TextFile:x.npy.txt",
    ]
    assert np.loadtxt("x.npy.txt").tolist() == [[1.5, -2.25], [0, 452]]


@pytest.mark.parametrize(
    ("values", "dtype", "shown"),
    [
        ([1, 2, 4], "int64", "[Max: 4] [Min: 1] [Mean: 2.3333333333333335]"),
        ([True, False], "bool", "[Max: 1] [Min: 0] [Mean: 0.5]"),
        ([0.1, np.nan], "float32", "[Max: nan] [Min: nan] [Mean: nan]"),
        ([0.1, 0.1], "float32", "[Max: 0.1] [Min: 0.1] [Mean: 0.1]"),
        ([], "float32", "[Max: -] [Min: -] [Mean: -]"),
    ],
)
def test_000_131_pt_has_the_digits_of_the_type(shell: Shell, values: Any, dtype: str, shown: str) -> None:
    saved("x.npy", values, dtype)
    assert f"[Dtype: {dtype}] {shown}" in shell("pt -n x.npy")
    assert Path("x.npy.txt").is_file()


def test_000_131_pt_never_unpickles(shell: Shell) -> None:
    np.save("x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "x.npy has elements of type '|O'" in shell("pt -n x.npy", code=3)
    assert not Path("x.npy.txt").exists()


# --- pk ---------------------------------------------------------------------------------------------------------


def write_pkl(*, stack: bool) -> str:
    numbers = [1.576936960220337, -0.9757485389709473, 0.4961632490158081, 2.0]
    rows: list[list[Any]] = [
        [f"{API}_input.0", 1, [], "torch.float32", [2, 1, 2, 2], numbers],
        [f"{API}_output", 1, [], "torch.float32", [2, 2, 1, 1], numbers],
        ["Functional_conv2d_01_forward_output", 1, [], "torch.float32", [1], numbers],
    ]
    if stack:
        frames = [["net.py", "58", "forward", "return conv(x)"], ["train.py", "3", "main", "y = net(x)"]]
        rows.insert(0, [f"{API}_stack_info", frames])
    Path("api_stack_dump.pkl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "api_stack_dump.pkl"


def test_000_132_pk_shows_the_statistics_of_an_api(shell: Shell) -> None:
    text = shell(f"pk -f ./{write_pkl(stack=False)} -n {API}")
    assert text.splitlines() == [
        "Statistic Info:",
        f"  [{API}_input.0][dtype: torch.float32][shape: [2, 1, 2, 2]][max: 1.576936960220337][min: -0.9757485389709473]"
        "[mean: 0.4961632490158081]",
        f"  [{API}_output][dtype: torch.float32][shape: [2, 2, 1, 1]][max: 1.576936960220337][min: -0.9757485389709473]"
        "[mean: 0.4961632490158081]",
    ]


def test_000_132_pk_shows_the_stack_where_there_is_one_however_short(shell: Shell) -> None:
    text = shell(f"pk -f {write_pkl(stack=True)} -n {API}")
    trace = text[text.index("Trace back(") :].splitlines()
    assert [line.strip() for line in trace[1:]] == [
        'File "train.py", line 3, in main',
        "y = net(x)",
        'File "net.py", line 58, in forward',
        "return conv(x)",
    ]


def test_000_132_pk_says_what_is_wrong(shell: Shell) -> None:
    assert "has no API 'Torch_add'" in shell(f"pk -f {write_pkl(stack=True)} -n Torch_add", code=3)
    Path("real.pkl").write_bytes(b"\x80\x04K\x01.")
    assert "a Python pickle, which is never loaded" in shell(f"pk -f real.pkl -n {API}", code=3)
    assert "no.pkl is not a file" in shell(f"pk -f no.pkl -n {API}", code=3)


# --- cn ---------------------------------------------------------------------------------------------------------


def test_000_133_134_cn_shows_tables_and_a_panel_as_in_the_example(shell: Shell) -> None:
    saved("my_data.npy", [[1.0, 2.0], [3.0, 0.5]])
    saved("golden.npy", [[1.0, 2.005], [3.25, 0.5]])
    text = shell("cn -m my_data*.npy -g gol*.npy -p 2 -s -al 0.002 -rl 0.005")
    lines = text.splitlines()
    assert [word for word in lines[0].split("  ") if word] == ["Error Item Table", " Top Item Table"]
    assert lines[2].count("┃ Index ┃ Left") == 2
    # 0.005 is within 0.002 + 0.005 * 2.005, 0.25 is not within 0.002 + 0.005 * 3.25.
    assert "│ 2     │ 3.0  │ 3.25  │ 0.25 │" in lines[4]
    assert "│ 0     │ 1.0  │ 1.0   │ 0.0" in lines[4]
    assert "│ 1     │ 2.0  │ 2.005 │ 0.00500" in lines[5]
    panel = [line.strip("│ ") for line in lines[lines.index(next(line for line in lines if line[0] == "╭")) + 1 : -1]]
    assert panel == [
        "Left:",
        "|- NpyFile: my_data.npy",
        "|- TxtFile: my_data.npy.txt",
        "|- NpySpec: [Shape: (2, 2)] [Dtype: float32] [Max: 3.0] [Min: 0.5] [Mean: 1.625]",
        "DstFile:",
        "|- NpyFile: golden.npy",
        "|- TxtFile: golden.npy.txt",
        "|- NpySpec: [Shape: (2, 2)] [Dtype: float32] [Max: 3.25] [Min: 0.5] [Mean: 1.68875]",
        "NumCnt:   4",
        "AllClose: False",
        "CosSim:   " + panel[10].split()[-1],
        "ErrorPer: 0.25  (rl= 0.005, al= 0.002)",
    ]
    left, right = np.array([1, 2, 3, 0.5]), np.array([1, 2.005, 3.25, 0.5])
    cosine = float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))
    assert float(panel[10].split()[-1]) == pytest.approx(cosine, rel=1e-7)
    assert Path("my_data.npy.txt").is_file() and Path("golden.npy.txt").is_file()


def test_000_133_cn_shows_twenty_elements_and_has_limits_of_a_thousandth(shell: Shell) -> None:
    saved("a.npy", np.full(100, 1.0))
    saved("b.npy", np.full(100, 1.0025))
    text = shell("cn -m a.npy -g b.npy")
    assert "ErrorPer: 1.0  (rl= 0.001, al= 0.001)" in text
    assert len([line for line in text.splitlines() if "│ 1.0025 │" in line]) == 20
    assert "AllClose: True" in shell("cn -m a.npy -g a.npy -p 0")


def test_000_133_cn_takes_nan_for_an_error_unless_both_have_it(shell: Shell) -> None:
    saved("a.npy", [np.nan, np.nan, 1])
    saved("b.npy", [np.nan, 2, 1])
    text = shell("cn -m a.npy -g b.npy")
    assert "ErrorPer: 0.3333333333333333" in text
    assert "│ 1     │ nan  │ 2.0   │ inf  │" in text


def test_000_133_134_cn_says_what_is_wrong(shell: Shell) -> None:
    saved("a.npy", np.zeros((2, 3)))
    saved("b.npy", np.zeros((2, 4)))
    assert "a.npy has 6 elements, b.npy has 8" in shell("cn -m a.npy -g b.npy", code=3)
    assert "*.npy stands for 2 files" in shell("cn -m *.npy -g b.npy", code=3)
    assert "'-1' is no limit" in shell("cn -m a.npy -g b.npy -al=-1", code=2)
    assert "'x' is no number of elements" in shell("cn -m a.npy -g b.npy -p x", code=2)
    saved("c.npy", np.zeros(6))
    assert "[WARNING] the shapes are (2, 3) and (6,)" in shell("cn -m a.npy -g c.npy")


def test_000_129_vc_that_could_not_compare_everything_ends_with_3_and_results_of_one_second_are_kept(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20260101000000")
    for side, names in (("my", "ab"), ("golden", "a")):
        Path(side).mkdir()
        for name in names:
            saved(f"{side}/Torch_{name}_0_forward_output.0.npy", [1, 2])
    assert "b_0_forward_output.0 was not compared" in shell("vc -m my -g golden", code=3)
    shell("vc -m my -g my")
    found = sorted(path.name for path in Path("parse_data/compare_result").iterdir())
    assert found == ["result_20260101000000.csv", "result_20260101000000_1.csv"]
