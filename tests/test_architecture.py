"""The rules of the house that a machine can check. Sources are parsed, never imported
(but the table of operators, which says what an operator is).

Each rule is a function from a path below src/ulpscope and a text to the violations it finds, so that the rules themselves are
tested on made-up sources at the end of this file.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from ulpscope.model import operators

SRC = Path(__file__).resolve().parent.parent / "src"
PACKAGE = SRC / "ulpscope"

VOCABULARY = frozenset({"model", "native"})
# Numbers are the subject here: numpy may be imported.
NUMBERS = ("model/dtypes.py", "native/")
TOP = frozenset({"cli", "compat", "__init__", "__main__"})

# What each part may import besides itself and the vocabulary. A part that is not named here has no place in the house yet.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "model": frozenset(),
    "native": frozenset({"model"}),
    "store": frozenset(),
    "frameworks": frozenset(),
    "capture": frozenset({"store", "frameworks"}),
    "monitor": frozenset({"store", "frameworks"}),
    "replay": frozenset({"store", "frameworks", "compare"}),
    "compare": frozenset({"store"}),
    "findings": frozenset({"store", "compare"}),
    "analyze": frozenset({"store", "compare", "findings"}),
    "report": frozenset({"store", "compare", "findings", "analyze", "replay"}),
    "viewer": frozenset({"store", "compare", "findings", "analyze", "report"}),
}
MAY_IMPORT["api"] = frozenset(MAY_IMPORT)
BELOW_TOP = frozenset(MAY_IMPORT)
MAY_IMPORT |= dict.fromkeys(TOP, BELOW_TOP | TOP)

FRAMEWORK_PACKAGES = frozenset({"torch", "torch_npu", "mindspore"})
MAX_LINES = {".py": 600, ".pyi": 600, ".c": 700}
CLI_LINES, CLI_BODY = 130, 25
SAYS_NOTHING = frozenset({"utils", "util", "common", "helpers", "helper", "misc"})
EMPTY_SUFFIXES = ("Manager", "Handler", "Processor", "Helper")


@dataclass(frozen=True, slots=True)
class Import:
    name: str
    line: int
    for_types_only: bool


def part_of(path: str) -> str:
    """The part of the house a file belongs to: `store` for store/dump.py, `records` for records.py."""
    return PurePosixPath(path).with_suffix("").parts[0]


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(path: str, source: str) -> Iterator[Import]:
    """Every import of the file by its absolute name, also inside functions and through import_module("...")."""
    package = ("ulpscope", *PurePosixPath(path).parent.parts)

    def walk(node: ast.AST, for_types_only: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(alias.name, node.lineno, for_types_only)
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else ()
                origin = ".".join((*base, *([node.module] if node.module else [])))
                for alias in node.names:
                    yield Import(f"{origin}.{alias.name}", node.lineno, for_types_only)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, node.lineno, for_types_only)
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.body:
                yield from walk(child, True)
            for child in node.orelse:
                yield from walk(child, for_types_only)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, for_types_only)

    return walk(ast.parse(source), False)


def wrong_directions(path: str, source: str) -> list[str]:
    """Imports of our own parts against the direction; an import for types only is a dependency as well."""
    part = part_of(path)
    if part not in MAY_IMPORT:
        return [f"{path}: {part} has no place in MAY_IMPORT; give it one, or put the file where it belongs"]
    allowed = MAY_IMPORT[part] | {part} | (frozenset() if part in VOCABULARY else VOCABULARY)
    found = []
    for each in imports(path, source):
        root, *rest = each.name.split(".")
        if root != "ulpscope":
            continue
        # `from ulpscope import __version__` imports the package itself, which is the top.
        target = rest[0] if rest and rest[0] in MAY_IMPORT else "__init__"
        if rest and (PACKAGE / rest[0]).is_dir():
            target = rest[0]
        if target not in allowed:
            found.append(f"{path}:{each.line}: {part} may not import {each.name}")
    return found


def foreign_to_vocabulary(path: str, source: str) -> list[str]:
    """Imports in the vocabulary that are neither ours nor the standard library's; numpy only where numbers are its subject."""
    part = part_of(path)
    if part not in VOCABULARY:
        return []
    allowed = sys.stdlib_module_names | {"ulpscope"} | ({"numpy"} if path.startswith(NUMBERS) else set())
    return [
        f"{path}:{each.line}: the vocabulary may not import {each.name}"
        for each in imports(path, source)
        if each.name.split(".")[0] not in allowed and not each.for_types_only
    ]


def framework_imports(path: str, source: str) -> list[str]:
    """Imports of a framework outside the seam, lazy ones included."""
    if part_of(path) == "frameworks":
        return []
    return [
        f"{path}:{each.line}: {each.name} may be imported only below frameworks/"
        for each in imports(path, source)
        if each.name.split(".")[0] in FRAMEWORK_PACKAGES and not each.for_types_only
    ]


def too_long(path: str, source: str) -> list[str]:
    limit, lines = MAX_LINES[PurePosixPath(path).suffix], len(source.splitlines())
    return [f"{path} has {lines} lines, at most {limit} are allowed; split it by subject"] if lines > limit else []


def names_that_say_nothing(path: str, source: str) -> list[str]:
    parts = PurePosixPath(path).with_suffix("").parts
    return [f"{path}: the name {part!r} says nothing; name the subject" for part in parts if part in SAYS_NOTHING]


def prints(path: str, source: str) -> list[str]:
    if part_of(path) in {"cli", "report"}:
        return []
    return [
        f"{path}:{node.lineno}: print belongs to cli/ and report/; use logging.getLogger(__name__)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def empty_class_names(path: str, source: str) -> list[str]:
    return [
        f"{path}:{node.lineno}: the suffix of class {node.name} says nothing; name what it is"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name.endswith(EMPTY_SUFFIXES)
    ]


def commands_that_do_the_work(path: str, source: str) -> list[str]:
    """A command is options and a few lines: what a verb does is a function of api/, which a program can call as well."""
    if part_of(path) != "cli":
        return []
    lines = len(source.splitlines())
    found = [f"{path} has {lines} lines, a command may have {CLI_LINES}"] if lines > CLI_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            body = (node.end_lineno or 0) - first.lineno + 1
            if body > CLI_BODY:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {body} lines, at most {CLI_BODY}; the rest is api's"
                )
    return found


def private_names_of_torch(path: str, source: str) -> list[str]:
    """torch may change what is not public: one file asks for it."""
    if path == "frameworks/torch/internals.py":
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        words: list[str] = []
        if isinstance(node, ast.Attribute):
            walk: ast.expr = node
            while isinstance(walk, ast.Attribute):
                words.insert(0, walk.attr)
                walk = walk.value
            words = [walk.id, *words] if isinstance(walk, ast.Name) else []
        elif isinstance(node, ast.ImportFrom) and node.module:
            words = [*node.module.split("."), *(alias.name for alias in node.names)]
        private = [word for word in words if word.startswith("_") and not word.startswith("__")]
        if private and words[0] == "torch" and words[1] != "ops":
            found.append(f"{path}:{node.lineno}: {private[0]} of torch is not public; ask for it in internals.py")
    return list(dict.fromkeys(found))


# The one place where operators are listed; elsewhere only what is defined by a function, or is an older tool's own list.
LIST_OPERATORS = {
    "model/operators.py": "the table",
    "findings/advice.py": "an older tool's list, in its words",
    "frameworks/torch/mode_dependent.py": "a function each: for which arguments",
    "frameworks/torch/replay_definitions.py": "a function each: the definition",
    "frameworks/torch/replay_scales.py": "a function each: the scale of its error",
    "frameworks/torch/unwritten.py": "a function each: which part it writes",
    "replay/standards.py": "an older tool's standards",
    "report/relations.py": "a function each: what an older tool expects of ranks",
}
# Names of operators that are words of other things as well: dtypes, statistics, fields.
AMBIGUOUS = """abs add all any barrier bfloat16 bool byte char complex copy cpu cuda data __delete__ dim div dot double eq
    float full ge __get__ grad gt half index int le log long lt max mean median min mul mv ne neg normal npu pad pow rename
    repeat round scatter select send __set__ short sign size storage stride sub sum tensor to type view where"""
MANY = 3


def is_operator(word: str) -> bool:
    bare = operators.bare(word)
    known = bool(operators.traits(word)) or bare in operators.ROLES_OF_COLLECTIVES or bare in operators.FACTORS_ROUNDED
    return known and bare.strip("_") not in AMBIGUOUS.replace("_", "").split()


def operator_lists(path: str, source: str) -> list[str]:
    """Tables of operators beside the one that there is: a collection, the keys of a dict, or a text of three or more."""
    if path in LIST_OPERATORS:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Set() | ast.Tuple() | ast.List():
                parts = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            case ast.Dict():
                parts = [each.value for each in node.keys if isinstance(each, ast.Constant)]
            case ast.Constant(value=str(text)):
                words = text.split()
                parts = words if sum(map(is_operator, words)) > len(words) / 2 else []
            case _:
                continue
        named = [part for part in parts if isinstance(part, str) and is_operator(part)]
        if len(named) >= MANY:
            found.append(
                f"{path}:{node.lineno}: {', '.join(named[:MANY])}: what operators are stands in model/operators.py"
            )
    return found


MOST_LINES = 50
# Longer functions that there are, and how long they may be: this list only shrinks.
LONG_FUNCTIONS = {
    "compare/value_graph.py: __init__": 51,
    "compat/msprobe/precheck.py: _run": 59,
    "frameworks/torch/cuda_kernels.py: _careful": 69,
    "frameworks/torch/cuda_kernels.py: measure_part": 52,
    "frameworks/torch/cuda_wide_kernels.py: wide_part": 76,
    "frameworks/torch/dispatch_tap.py: run": 58,
    "frameworks/torch/function_tap.py: run_recorded": 82,
    "frameworks/torch/module_tap.py: _record": 93,
    "frameworks/torch/probe.py: __init__": 72,
    "frameworks/torch/replay_mode.py: run": 57,
    "frameworks/torch/replay_reference.py: _shaken": 57,
    "frameworks/torch/replay_score.py: rounded_score": 51,
    "native/calls.c: open_call": 85,
    "native/mode.c: look": 76,
    "native/mode.c: run_recorded": 78,
    "native/stacks.c: stack_number": 69,
    "report/legacy_cells.py: usual_statistic_row": 60,
    "store/files/pt.py: _step": 58,
}
C_FUNCTION = re.compile(
    r"^(?!typedef|enum|struct|union)\w[^\n;={}]*?(\w+)\([^;{}]*?\)[^;{}=]*\{\n.*?^\}", re.MULTILINE | re.DOTALL
)


def functions(path: str, source: str) -> Iterator[tuple[str, int, int]]:
    """The name, first line and length of every function."""
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                yield node.name, node.lineno, node.end_lineno - node.lineno + 1
    else:
        for found in C_FUNCTION.finditer(source):
            yield found[1], source[: found.start()].count("\n") + 1, found[0].count("\n") + 1


def long_functions(path: str, source: str) -> list[str]:
    return [
        f"{path}:{line}: {name} has {length} lines, at most {MOST_LINES} are allowed; give a part of it a name"
        for name, line, length in functions(path, source)
        if length > LONG_FUNCTIONS.get(f"{path}: {name}", MOST_LINES)
    ]


Rule = Callable[[str, str], list[str]]
RULES_FOR_PYTHON: list[Rule] = [
    wrong_directions,
    foreign_to_vocabulary,
    framework_imports,
    private_names_of_torch,
    prints,
    empty_class_names,
    commands_that_do_the_work,
    operator_lists,
]
RULES_FOR_ALL: list[Rule] = [too_long, long_functions, names_that_say_nothing]


def sources(*suffixes: str) -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in suffixes:
            yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def test_there_are_sources_to_check() -> None:
    assert any(path == "__init__.py" for path, _ in sources(".py"))


@pytest.mark.parametrize("rule", RULES_FOR_PYTHON, ids=lambda rule: rule.__name__)
def test_python_sources_keep_the_rule(rule: Rule) -> None:
    assert [violation for path, source in sources(".py", ".pyi") for violation in rule(path, source)] == []


@pytest.mark.parametrize("rule", RULES_FOR_ALL, ids=lambda rule: rule.__name__)
def test_all_sources_keep_the_rule(rule: Rule) -> None:
    assert [violation for path, source in sources(*MAX_LINES) for violation in rule(path, source)] == []


def test_a_function_that_is_allowed_to_be_long_still_is() -> None:
    lengths = {
        f"{path}: {name}": length
        for path, source in sources(".py", ".c", ".h")
        for name, _, length in functions(path, source)
        if f"{path}: {name}" in LONG_FUNCTIONS and length > MOST_LINES
    }
    assert lengths == LONG_FUNCTIONS, "take it off the list, or lower its number"


def run_python(*arguments: str) -> tuple[str, list[str], set[str]]:
    """stdout, the other lines of stderr, and the names of all modules imported by a fresh interpreter that must exit with 0."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    timed, other = [], []
    for line in done.stderr.splitlines():
        (timed if line.startswith("import time:") else other).append(line)
    return done.stdout, other, {line.rsplit("|", 1)[-1].strip() for line in timed}


def test_importing_ulpscope_prints_nothing_and_imports_no_framework_and_no_terminal_library() -> None:
    stdout, stderr, modules = run_python("-c", "import ulpscope")
    assert (stdout, stderr) == ("", [])
    assert "ulpscope" in modules
    assert modules & (FRAMEWORK_PACKAGES | {"click", "rich"}) == set()


def test_every_public_name_is_where_the_package_says() -> None:
    run_python("-c", "import ulpscope\nfor name in ulpscope.__all__: getattr(ulpscope, name)")


def test_help_exits_with_0_and_imports_no_framework() -> None:
    stdout, _, modules = run_python("-m", "ulpscope", "--help")
    assert "ulpscope" in stdout
    assert "ulpscope.cli.main" in modules
    assert modules & FRAMEWORK_PACKAGES == set()


BAD: list[tuple[Rule, str, str]] = [
    (wrong_directions, "store/dump.py", "from ulpscope.frameworks.base import Tap"),
    (wrong_directions, "store/dump.py", "from ..frameworks import base"),
    (wrong_directions, "store/formats/msprobe.py", "from ...capture.session import Session"),
    (wrong_directions, "frameworks/torch/summary.py", "def f():\n    import ulpscope.store.writer"),
    (wrong_directions, "capture/session.py", "from ulpscope import compare"),
    (wrong_directions, "capture/session.py", "from ulpscope import __version__"),
    (wrong_directions, "capture/session.py", "from ulpscope.monitor import watch"),
    (wrong_directions, "compare/engine.py", "from ulpscope.findings import divergence"),
    (wrong_directions, "report/html.py", "import ulpscope.frameworks.base"),
    (wrong_directions, "viewer/server.py", "from ulpscope.capture import session"),
    (wrong_directions, "analyze/ledger.py", "if TYPE_CHECKING:\n    from ulpscope.report import rows"),
    (wrong_directions, "model/records.py", "from ..store import dump"),
    (wrong_directions, "model/records.py", "import importlib\nimportlib.import_module('ulpscope.store')"),
    (wrong_directions, "gadgets/new.py", ""),
    (foreign_to_vocabulary, "model/records.py", "import numpy as np"),
    (foreign_to_vocabulary, "model/dtypes.py", "import safetensors"),
    (framework_imports, "capture/recorder.py", "import torch"),
    (framework_imports, "compare/metrics.py", "def f():\n    from torch.nn import functional"),
    (framework_imports, "cli/main.py", "import importlib\nimportlib.import_module('mindspore')"),
    (framework_imports, "cli/main.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
    (private_names_of_torch, "frameworks/torch/tensors.py", "x = torch._C._functorch.maybe_current_level()"),
    (private_names_of_torch, "frameworks/torch/tensors.py", "from torch.utils._pytree import tree_map"),
    (long_functions, "store/dump.py", "def read():\n" + "    pass\n" * 50),
    (long_functions, "native/calls.c", "static int read(Fast *f,\n    int at) {\n" + "    at++;\n" * 48 + "}\n"),
    (operator_lists, "findings/rules.py", "UNEVEN = frozenset(['addcdiv', 'divide', 'log10'])"),
    (operator_lists, "findings/rules.py", "if name in ('addmm', 'aten.bmm.default', 'baddbmm_'): pass"),
    (operator_lists, "findings/rules.py", "SCALES = {'addcmul': 1, 'lerp': 2, 'gelu': 3}"),
    (operator_lists, "findings/rules.py", "NAMES = 'addmm bmm mm baddbmm'.split()"),
    (too_long, "store/dump.py", "\n" * 601),
    (too_long, "native/measure.c", "\n" * 701),
    (names_that_say_nothing, "store/utils.py", ""),
    (names_that_say_nothing, "common/paths.py", ""),
    (prints, "store/dump.py", "def f():\n    print('read')"),
    (empty_class_names, "store/dump.py", "def f():\n    class DumpManager: ..."),
    (commands_that_do_the_work, "cli/show.py", "\n" * 131),
    (commands_that_do_the_work, "cli/show.py", "def f():\n    'x'\n" + "    g()\n" * 26),
    (wrong_directions, "api/checks.py", "from ulpscope.cli.main import cli"),
    (wrong_directions, "replay/one.py", "from ulpscope.api import rerun"),
]

GOOD: list[tuple[Rule, str, str]] = [
    (
        wrong_directions,
        "store/dump.py",
        "from ulpscope.model.records import Value\nfrom . import run_folder\nfrom ..model.errors import DumpError",
    ),
    (wrong_directions, "store/__init__.py", "from .dump import Dump"),
    (
        wrong_directions,
        "replay/runner.py",
        "from ulpscope.compare import metrics\nfrom ulpscope.frameworks import base",
    ),
    (wrong_directions, "viewer/server.py", "from ulpscope.report import rows\nfrom ulpscope.compare import engine"),
    (wrong_directions, "__init__.py", "from .capture.session import Session"),
    (wrong_directions, "cli/main.py", "from ulpscope import __version__\nimport click"),
    (foreign_to_vocabulary, "model/options.py", "from __future__ import annotations\nimport json"),
    (foreign_to_vocabulary, "model/dtypes.py", "import numpy as np"),
    (framework_imports, "frameworks/torch/tensors.py", "import torch"),
    (framework_imports, "capture/recorder.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    (framework_imports, "capture/recorder.py", "from ulpscope.frameworks import torch"),
    (framework_imports, "capture/recorder.py", "import sys\nsys.modules.get('torch')"),
    (private_names_of_torch, "frameworks/torch/internals.py", "x = torch._C._functorch"),
    (
        private_names_of_torch,
        "frameworks/torch/tensors.py",
        "x = value._version, torch.__version__, torch.ops._c10d_functional",
    ),
    (long_functions, "store/dump.py", "def read():\n" + "    pass\n" * 49),
    (long_functions, "native/calls.c", "int read(Fast *f) {\n" + "    f++;\n" * 48 + "}\n"),
    (
        long_functions,
        "native/calls.c",
        "typedef struct {\n" + "    int at;\n" * 60 + "} Rows;\nint a(void) {\n    f();\n}\n",
    ),
    (operator_lists, "findings/rules.py", "if name in ('mm', 'addmm'): pass"),
    (operator_lists, "report/text.py", "COLUMNS = ('type', 'shape', 'max', 'min', 'mean')"),
    (operator_lists, "model/operators.py", "NAMES = ['addmm', 'bmm', 'baddbmm']"),
    (too_long, "store/dump.py", "\n" * 500),
    (too_long, "native/measure.c", "\n" * 700),
    (names_that_say_nothing, "store/run_folder.py", ""),
    (prints, "cli/main.py", "print('done')"),
    (prints, "store/dump.py", "text = 'print(1)'"),
    (empty_class_names, "store/dump.py", "class DumpReader: ..."),
    (commands_that_do_the_work, "cli/show.py", "def f():\n    'x\\n\\ny'\n" + "    g()\n" * 25),
    (commands_that_do_the_work, "api/checks.py", "def f():\n" + "    g()\n" * 26),
    (wrong_directions, "cli/show.py", "from ulpscope.api.checks import check_ops"),
]


def case_name(case: object) -> str:
    return getattr(case, "__name__", str(case).replace("\n", "; ").strip("; ")[:40] or "empty")


@pytest.mark.parametrize(("rule", "path", "source"), BAD, ids=case_name)
def test_the_rule_finds_one_violation(rule: Rule, path: str, source: str) -> None:
    assert len(rule(path, source)) == 1


@pytest.mark.parametrize(("rule", "path", "source"), GOOD, ids=case_name)
def test_the_rule_accepts_what_is_allowed(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source) == []
