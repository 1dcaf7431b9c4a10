"""How large the rooms of the house may be and how entangled its files: budgets, cycles, fan-out, state in C, words that are gone.

Everything is read from the sources. What is over a limit today stands in a table with its figure: it may become less, and
then the table must say so; it may never become more.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "ulpscope"

# Lines of Python in each room, rounded up to the next fifty. A room that needs more takes it from another, in the same commit.
LINES = {
    "analyze": 2000,
    "api": 1050,
    "capture": 2000,
    "cli": 1300,
    "compare": 3550,
    "compat": 4750,
    "findings": 2750,
    "frameworks": 16300,
    "model": 1400,
    "native": 1400,
    "replay": 2500,
    "report": 4650,
    "store": 7800,
}
# Statements of C, by what they are for: lines can be packed, statements cannot.
STATEMENTS = {
    "measure": (
        (
            "measure.c",
            "measure.h",
            "measure_kernels.h",
            "crc.h",
            "half.h",
            "cpu.h",
            "abi.h",
        ),
        650,
    ),
    "pairs": (
        (
            "pairs.c",
            "pairs_kernels.h",
            "pairs_near.h",
        ),
        550,
    ),
    "capture": (
        (
            "calls.c",
            "capture.c",
            "capture.h",
            "cuda_queue.c",
            "edges.c",
            "foreign.c",
            "gate.c",
            "gradients.c",
            "mode.c",
            "modules.c",
            "recorder.c",
            "schema.h",
            "stacks.c",
            "texts.c",
            "torch_abi.c",
            "values.c",
        ),
        3125,
    ),
}
MOST_IMPORTS = 12
# Putting the parts together is the work of these.
ASSEMBLY = {
    "api/blaming.py": 20,
    "api/checks.py": 20,
    "api/comparing.py": 20,
    "capture/session.py": 25,
    "frameworks/torch/probe.py": 20,
}
WIDE = {
    "compare/engine.py": 13,
    "compat/msprobe/comparing.py": 18,
    "compat/ptdbg_ascend/comparing.py": 18,
    "compat/ptdbg_ascend/parse_verbs.py": 15,
    "findings/divergence.py": 16,
    "frameworks/torch/finiteness.py": 13,
    "frameworks/torch/function_tap.py": 13,
    "frameworks/torch/replay_mode.py": 15,
    "replay/noise.py": 13,
    "report/first_difference.py": 14,
}
IN_CYCLES = {
    "store/formats/msprobe_folder.py",
    "store/formats/msprobe_reader.py",
}
# Variables of C that change and outlive a call; types and tables of methods are constants to us.
STATE_IN_C = {
    "capture.c": {"ways_gone", "word"},
    "cuda_queue.c": {"launcher"},
    "foreign.c": {"foreign", "foreign_at", "foreign_told"},
    "measure.c": {"float8", "sketch_mask", "stripe_key"},
    "pairs.c": {"float8"},
}
OF_TRITON = ("frameworks/torch/cuda_",)
# Names that were given up, each with what is said instead.
GONE = {
    r"\bdoors?\b": "the function mode hears of calls",
    r"(formats|report)[./]_?(leaves|cells)\b|\b_making\b": "that C is gone",
    r"\bown_threads\b": "model.background",
    r"\bulpscope\.(naming|config|records|errors|dtypes)\b": "model.*",
    r"\b_taps_[a-z]+\.c\b": "native/*.c",
}


def sources(*suffixes: str) -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in suffixes:
            yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def modules() -> dict[str, tuple[str, str]]:
    """Of the name of each module its path and text."""
    found = {}
    for path, text in sources(".py"):
        name = ".".join(("ulpscope", *Path(path).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = (path, text)
    return found


def imported(text: str, known: Iterable[str]) -> set[str]:
    """The modules of ours that a text imports when it runs, in functions too; not those for types alone."""
    known, found = set(known), set()
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= names or ({node.module} & known)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        todo += ast.iter_child_nodes(node)
    return found


def in_a_cycle(graph: dict[str, set[str]]) -> set[str]:
    """The modules from which an import leads back to themselves."""
    reach = {name: set(others) for name, others in graph.items()}
    for through in graph:
        for name in graph:
            if through in reach[name]:
                reach[name] |= reach[through]
    return {name for name in graph if name in reach[name]}


def state_in_c(text: str) -> set[str]:
    """The variables of a C file that outlive a call and are neither constant nor a type, a table of methods or a definition."""
    found = set()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    for line in re.findall(r"^(?:static )?[A-Za-z_][\w ]*[ *][\w\[\]* ,/+-]+(?= = |;)", text, flags=re.M):
        if re.match(
            r"(static )?(const |struct |typedef|extern|return|goto|else|Py(Type_|Method|Member|Module|MODINIT))", line
        ):
            continue
        if "PyModuleDef" in line or "(" in line:
            continue
        declared = re.sub(r"^(static )?(unsigned )?\w+ ", "", line)
        found |= {re.sub(r"\[.*|\*", "", each).strip() for each in declared.split(",")}
    return found


def statements(text: str) -> int:
    return re.sub(r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", "", text, flags=re.S).count(";")


def test_each_room_keeps_its_budget() -> None:
    lines: dict[str, int] = {}
    for path, text in sources(".py", ".pyi"):
        room = Path(path).parts[0]
        if not room.endswith(".py"):
            lines[room] = lines.get(room, 0) + len(text.splitlines())
    assert lines.keys() == LINES.keys()
    over = {room: f"{count} lines, {LINES[room]} are allowed" for room, count in lines.items() if count > LINES[room]}
    loose = {room: f"{count} lines: lower it" for room, count in lines.items() if count <= LINES[room] - 100}
    assert (over, loose) == ({}, {})


@pytest.mark.parametrize("part", STATEMENTS)
def test_each_part_in_c_keeps_its_budget(part: str) -> None:
    files, most = STATEMENTS[part]
    count = sum(statements((PACKAGE / "native" / file).read_text(encoding="utf-8")) for file in files)
    assert most - 50 < count <= most


def test_every_file_of_c_is_in_a_budget() -> None:
    files = {file for files, _ in STATEMENTS.values() for file in files}
    assert {path.name for path in (PACKAGE / "native").iterdir() if path.suffix in (".c", ".h")} == files


def test_few_files_import_many() -> None:
    known = modules()
    fan = {path: len(imported(text, known) - {name}) for name, (path, text) in known.items()}
    assert {path: count for path, count in fan.items() if count > MOST_IMPORTS and path not in ASSEMBLY} == WIDE
    assert {path: fan[path] for path, most in ASSEMBLY.items() if path in fan and fan[path] > most} == {}


def test_imports_go_in_no_circle() -> None:
    known = modules()
    circles = in_a_cycle({name: imported(text, known) - {name} for name, (_, text) in known.items()})
    assert {known[name][0] for name in circles} == IN_CYCLES


def test_nothing_private_is_imported() -> None:
    found = [
        f"{path}:{node.lineno}: {alias.name}"
        for path, text in sources(".py")
        if not path.startswith(OF_TRITON)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("ulpscope.")
        and node.module != "ulpscope.native"
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert found == []


def test_c_keeps_state_only_where_it_is_listed() -> None:
    found = {Path(path).name: state_in_c(text) for path, text in sources(".c")}
    assert {path: names for path, names in found.items() if names} == STATE_IN_C


def test_words_that_are_gone_stay_away() -> None:
    found = [
        f"{path}: {match[0]!r}: {instead}"
        for path, text in sources(".py", ".pyi", ".c", ".h")
        for word, instead in GONE.items()
        for match in re.finditer(word, text)
    ]
    assert found == []


def test_files_are_told_when_they_grow_long() -> None:
    """No failure: a cap cut subjects."""
    for path, text in sources(".py", ".c"):
        if len(text.splitlines()) > 600:
            warnings.warn(f"{path} has {len(text.splitlines())} lines; is it still one subject?", stacklevel=1)


def test_the_rules_see_what_they_are_for() -> None:
    assert in_a_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}
    assert imported("if TYPE_CHECKING:\n    from a import b\nelse:\n    from c import d", {"a.b", "c"}) == {"c"}
    assert state_in_c(
        "static Table t; /* x */\nstatic const int k = 1;\nstatic PyMethodDef m[] = {0};\nint f(void) {\n"
    ) == {"t"}
    assert state_in_c("static PyObject *one, *two;\nuint32_t mask[256][8];\n") == {"one", "two", "mask"}
    assert statements('int a = 1; /* b; */ char *c = ";";') == 2
