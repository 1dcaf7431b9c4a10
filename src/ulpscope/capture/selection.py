"""What is wanted of all that happens: steps, ranks, names, a span, phases and roles."""

from __future__ import annotations

import re

from ulpscope.model.names import KINDS, MODULE, OPTIMIZER, call_text, is_asked, is_within
from ulpscope.model.options import CaptureConfig
from ulpscope.model.records import CallId, Level, Phase, Role

Numbers = tuple[int | tuple[int, int], ...]

# With which names begin that are no path of a module, though they have a dot.
_KINDS = KINDS | {OPTIMIZER}
_ENDS = {Phase.FORWARD: ".forward", Phase.BACKWARD: ".backward"}
_WHOLE = re.compile(r"Module\.(?P<name>.+)\.(?P<phase>forward|backward)\.(?P<index>\d+)")


class Selection:
    """Answers `wants` for one capture, and remembers what calls tell as they pass: whether the span is open, which named module
    runs, and of which calls forward and backward are not both wanted."""

    def __init__(self, config: CaptureConfig) -> None:
        self._config = config
        self._named: dict[tuple[str, str], bool | None] = {}
        self.matched: set[str] = set()
        self.forward = not config.phases or Phase.FORWARD in config.phases
        self.backward = not config.phases or Phase.BACKWARD in config.phases
        self._roles = config.roles
        self._free = not config.only and not config.skip and config.scope is None and config.below is None
        # At level mix a module that is named stands for all that it calls.
        self._unfolds = config.level is Level.MIX
        ends = [_phase_of(name) for name in config.scope or ()]
        self._is_of_forwards = Phase.BACKWARD not in ends and Phase.FORWARD in ends
        # Whether the span reaches into a backward pass: then each backward is asked for when it runs.
        self.follows_backward = Phase.BACKWARD in ends
        self.begin_step()

    @property
    def is_free(self) -> bool:
        """Whether every call is wanted, forward and backward."""
        return self._free and self.forward and self.backward

    def begin_step(self) -> None:
        self._inside = False
        self._last_module: str | None = None
        self._whole: set[str] = set()  # modules whose forward and backward are wanted
        self._running: dict[str, str] = {}
        self._apart: dict[tuple[str, str, int], bool] = {}

    def wants_step(self, step: int) -> bool:
        return _holds(self._config.steps, step)

    def wants_rank(self, rank: int) -> bool:
        return _holds(self._config.ranks, rank)

    def past(self, step: int) -> bool:
        """Whether every asked step is over."""
        steps = self._config.steps
        return bool(steps) and step > max(item if isinstance(item, int) else item[1] for item in steps)

    def wants_role(self, role: Role) -> bool:
        return not self._roles or role in self._roles or role is Role.PARAMETERS

    def of_name(self, kind: str, name: str) -> bool | None:
        """Whether all calls of a name are wanted, or none; None where each must be asked for."""
        key = kind, name
        if key not in self._named:
            self._named[key] = self._decide(kind, name)
        return self._named[key]

    def _decide(self, kind: str, name: str) -> bool | None:
        config = self._config
        if config.scope is not None or config.below is not None:
            return None
        only = self._covers(config.only, kind, name) if config.only else True
        skip = self._covers(config.skip, kind, name)
        if only is False or skip:
            return False
        return True if only and skip is False else None

    def wants(self, kind: str, name: str, index: int, phase: Phase, module: str = "") -> bool:
        """Whether a forward call is wanted by name, span, and the path of the module it is in. Called once for each call, in
        order, unless its name tells."""
        named = self.of_name(kind, name)
        if named is not None:
            return named
        if phase is Phase.PARAMETERS_GRAD:
            return name in self._whole
        config = self._config
        self._see_module(kind, name, index, module)
        if config.below is not None:
            forward, backward = (is_asked(config.below, CallId(kind, name, index, phase)) for phase in _ENDS)
        else:
            forward, backward = (
                self._wanted_phases(config.only, kind, name, index, module) if config.only else (True, True)
            )
            if config.skip:
                skipped = self._wanted_phases(config.skip, kind, name, index, module)
                forward, backward = forward and not skipped[0], backward and not any(skipped)
        if config.scope is not None:
            inside = self._passes(kind, name, call_text(CallId(kind, name, index, phase)), module)
            forward = forward and inside
            backward = backward and (inside or self.follows_backward) and not self._is_of_forwards
        if forward and backward and kind == MODULE:
            self._whole.add(name)
        if forward != backward and phase is Phase.FORWARD:
            self._apart[kind, name, index] = backward
        return forward

    def wants_backward(self, kind: str, name: str, index: int, chosen: bool) -> bool:
        """Whether the backward of a call is wanted: as its forward was chosen, recorded or not, or named by itself."""
        named = self.of_name(kind, name)
        if not self.backward or named is not None:
            return self.backward and bool(named)
        return self._apart.get((kind, name, index), chosen)

    def wants_now(self, kind: str, name: str, index: int, module: str) -> bool:
        """Whether a backward that begins to run, and was wanted, is inside the span. Called once for each, in order."""
        return self._passes(kind, name, call_text(CallId(kind, name, index, Phase.BACKWARD)), module)

    def _passes(self, kind: str, name: str, text: str, module: str) -> bool:
        """Opens and closes the span as a call passes. A module that ends it does so with the last call inside it."""
        assert self._config.scope is not None
        first, last = self._config.scope
        if self._last_module is not None and not is_within(module, self._last_module):
            self._inside, self._last_module = False, None
        if _is_named(first, kind, name, text):
            self._inside = True
            self.matched.add(first)
        inside = self._inside
        if _is_named(last, kind, name, text):
            self.matched.add(last)
            if kind == MODULE and inside and "." in name:
                self._last_module = name.rpartition(".")[0]
            else:
                self._inside = False
        return inside

    def _see_module(self, kind: str, name: str, index: int, module: str) -> None:
        """Keeps which of the modules that are named in full are running: from their call on, until one comes from outside."""
        if not self._unfolds:
            return
        self._running = {text: path for text, path in self._running.items() if not path or is_within(module, path)}
        if kind == MODULE:
            self._running[call_text(CallId(kind, name, index, Phase.FORWARD))] = name.rpartition(".")[0]

    def _wanted_phases(
        self, patterns: tuple[str, ...], kind: str, name: str, index: int, module: str
    ) -> tuple[bool, bool]:
        """Whether forward and backward of a call are named by any of the patterns. One with a phase stands for this phase alone."""
        found = {Phase.FORWARD: False, Phase.BACKWARD: False}
        for pattern in patterns:
            path = "" if kind == MODULE and not self._unfolds else _path_in(pattern)
            inside = bool(path) and is_within(module, path)
            for phase in found:
                text = call_text(CallId(kind, name, index, phase))
                if inside or _is_named(pattern, kind, name, text) or self._is_running(pattern, phase):
                    self.matched.add(pattern)
                    found[phase] = True
            if _is_of_name(pattern, kind, name):
                self.matched.add(pattern)
                return True, True
        return found[Phase.FORWARD], found[Phase.BACKWARD]

    def _is_running(self, pattern: str, phase: Phase) -> bool:
        if not self._running:
            return False
        named = _WHOLE.fullmatch(pattern)
        if named is None:
            return any(text.startswith(f"{pattern}.forward.") for text in self._running)
        return named["phase"] == phase.value and f"Module.{named['name']}.forward.{named['index']}" in self._running

    def unmatched(self) -> list[str]:
        """Names of the selection that no call ever had."""
        asked = (*self._config.only, *(self._config.scope or ()), *filter(None, [self._config.below]))
        return [name for name in asked if name not in self.matched]

    def _covers(self, patterns: tuple[str, ...], kind: str, name: str) -> bool | None:
        """Whether any of the patterns is true of all calls of a name; None where one may be true of some."""
        found: bool | None = False
        for pattern in patterns:
            unfolds = self._unfolds and pattern.startswith(f"{MODULE}.")
            if _is_of_name(pattern, kind, name) and not unfolds:
                self.matched.add(pattern)
                found = True
            elif not found and (_is_one_of(pattern, kind, name) or unfolds or (kind != MODULE and _path_in(pattern))):
                found = None
        return found


def _is_one_of(pattern: str, kind: str, name: str) -> bool:
    """Whether a pattern may be one call of this name."""
    return pattern.startswith(f"{kind}.{name}.")


def _phase_of(pattern: str) -> Phase | None:
    """The phase in a full name; None where it has none."""
    whole = _WHOLE.fullmatch(pattern)
    if whole is not None:
        return Phase(whole["phase"])
    return next((phase for phase, end in _ENDS.items() if pattern.endswith(end)), None)


def _is_named(pattern: str, kind: str, name: str, text: str) -> bool:
    """An exact call with or without its phase and number, or a module by its path."""
    if pattern in (text, f"{kind}.{name}"):
        return True
    if text.startswith(pattern) and text[len(pattern) :] in (".forward", ".backward"):
        return True
    return _is_path(pattern, kind, name)


def _is_of_name(pattern: str, kind: str, name: str) -> bool:
    """Any part of `Kind.name`, in any case: "relu" stands for every relu; or a module by its path."""
    return pattern.lower() in f"{kind}.{name}".lower() or _is_path(pattern, kind, name)


def _is_path(pattern: str, kind: str, name: str) -> bool:
    return kind == MODULE and pattern.removeprefix("Module.") in (name, name.rpartition(".")[0])


def _path_in(pattern: str) -> str:
    """The path of a module that a pattern may be, or nothing."""
    head, dot, rest = pattern.partition(".")
    return rest if head == MODULE else pattern if dot and head not in _KINDS else ""


def _holds(numbers: Numbers, number: int) -> bool:
    return not numbers or any(
        item == number if isinstance(item, int) else item[0] <= number <= item[1] for item in numbers
    )
