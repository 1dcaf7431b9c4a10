"""Modules that torch.export and torch.fx wrote down as graphs: their code is flat, and each node knows the module it came from."""

from __future__ import annotations

import re
import weakref
from types import CodeType, FrameType
from typing import Any

from torch.fx import GraphModule
from torch.nn import Module

from ulpscope.frameworks.base import PathOfCode

_ASSIGNED = re.compile(r"\s*(\w+)\b[^=]*=")
_ROOTS = re.compile(r"^(?:L__self__|L\['self'\])(?:\.|$)")
_CALLED = frozenset({"call_function", "call_method", "call_module"})


class GraphPath(PathOfCode):
    """The path of such a module. The calls that its code makes are in the modules of their nodes; `inside` says in which."""

    __slots__ = ("_base", "_codes", "_graph")
    _graph: weakref.ref[GraphModule]
    _base: str
    _codes: dict[CodeType, dict[int, str]]

    def __new__(cls, path: str, module: GraphModule, base: str) -> GraphPath:
        self = super().__new__(cls, path)
        self._graph = weakref.ref(module)
        self._base = base
        self._codes = {}
        return self

    def inside(self, frame: FrameType | None) -> str:
        """The path of the module from which came the node that this frame, or one below it, runs."""
        graph = self._graph()
        forward = getattr(getattr(type(graph), "forward", None), "__code__", None)
        while frame is not None and forward is not None:
            if frame.f_code is forward:
                lines = self._codes.get(forward)
                if lines is None and graph is not None:
                    lines = self._codes[forward] = _modules_by_line(graph, forward, self._base)
                return (lines or {}).get(frame.f_lineno, str(self))
            frame = frame.f_back
        return str(self)

    def kinds(self) -> dict[str, str]:
        """By path, of which class the modules were that the graph was made of."""
        graph, found = self._graph(), {}
        for node in () if graph is None else graph.graph.nodes:
            for path, kind in _stack_of(node):
                found[_joined(self._base, path)] = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
        return found


def path_of(module: Module, path: str, base: str | None) -> tuple[str, str | None]:
    """The path of a module, and what stands before the paths of nodes in the graphs below it."""
    if not isinstance(module, GraphModule) or not any(map(_stack_of, module.graph.nodes)):
        return path, base
    base = path if base is None else base
    return GraphPath(path, module, base), base


def _stack_of(node: Any) -> list[tuple[str, Any]]:
    """Paths and classes of the modules around a node, outermost first."""
    stack = getattr(node, "meta", {}).get("nn_module_stack") or {}
    return [each for each in stack.values() if isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)]


def _joined(base: str, inner: str) -> str:
    inner = _ROOTS.sub("", inner)
    return f"{base}.{inner}" if base and inner else base or inner


def _modules_by_line(graph: GraphModule, code: CodeType, base: str) -> dict[int, str]:
    """By line of the code that torch wrote for a graph: the module of the node that is computed there."""
    modules = {}
    for node in graph.graph.nodes:
        around = _stack_of(node) if node.op in _CALLED else []
        if node.op == "call_module":  # which is the innermost of them itself
            around = around[:-1]
        if around:
            modules[node.name] = _joined(base, around[-1][0])
    found: dict[int, str] = {}
    lines = graph.code.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith("def forward(")), None)
    if first is not None:
        for at, line in enumerate(lines[first:], code.co_firstlineno):
            assigned = _ASSIGNED.match(line)
            if assigned is not None and assigned[1] in modules:
                found[at] = modules[assigned[1]]
    return found
