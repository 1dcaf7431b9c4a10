"""What is wanted of all that happens: steps, ranks, names, a span, phases and roles."""

from __future__ import annotations

from ulpscope.model.names import KINDS, MODULE, OPTIMIZER, call_text, is_within
from ulpscope.model.options import CaptureConfig
from ulpscope.model.records import CallId, Phase, Role

Numbers = tuple[int | tuple[int, int], ...]

# With which names begin that are no path of a module, though they have a dot.
_KINDS = KINDS | {OPTIMIZER}


class Selection:
    """Answers `wants` for one capture. The span is the only thing that remembers: it opens and closes as calls pass."""

    def __init__(self, config: CaptureConfig) -> None:
        self._config = config
        self._named: dict[tuple[str, str], bool | None] = {}
        self._inside = False
        self.matched: set[str] = set()
        self.forward = not config.phases or Phase.FORWARD in config.phases
        self.backward = not config.phases or Phase.BACKWARD in config.phases
        self._roles = config.roles
        self._free = not config.only and not config.skip and config.scope is None

    @property
    def is_free(self) -> bool:
        """Whether every call is wanted, forward and backward."""
        return self._free and self.forward and self.backward

    def begin_step(self) -> None:
        self._inside = False

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
        if config.scope is not None:
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
        config = self._config
        text = call_text(CallId(kind, name, index, phase))
        if config.scope is not None:
            first, last = config.scope
            if _is_named(first, kind, name, text):
                self._inside = True
                self.matched.add(first)
            inside = self._inside
            if _is_named(last, kind, name, text):
                self._inside = False
                self.matched.add(last)
            if not inside:
                return False
        if config.only and not self._any(config.only, kind, name, text, module):
            return False
        return not (config.skip and self._any(config.skip, kind, name, text, module))

    def wants_backward(self, kind: str, name: str, index: int, chosen: bool) -> bool:
        """Whether the backward of a call is wanted: as its forward was chosen, recorded or not, or named by itself."""
        named = self.of_name(kind, name)
        if not self.backward or named is not None:
            return self.backward and bool(named)
        text = call_text(CallId(kind, name, index, Phase.BACKWARD))
        if any(_is_itself(pattern, kind, name, text) for pattern in self._config.skip):
            return False
        if text in self._config.only:
            self.matched.add(text)
            return True
        return chosen

    def unmatched(self) -> list[str]:
        """Names of the selection that no call ever had."""
        asked = (*self._config.only, *(self._config.scope or ()))
        return [name for name in asked if name not in self.matched]

    def _covers(self, patterns: tuple[str, ...], kind: str, name: str) -> bool | None:
        """Whether any of the patterns is true of all calls of a name; None where one may be true of some."""
        found: bool | None = False
        for pattern in patterns:
            if _is_of_name(pattern, kind, name):
                self.matched.add(pattern)
                found = True
            elif not found and (pattern.startswith(f"{kind}.{name}.") or (kind != MODULE and _path_in(pattern))):
                found = None
        return found

    def _any(self, patterns: tuple[str, ...], kind: str, name: str, text: str, module: str) -> bool:
        found = False
        for pattern in patterns:
            path = "" if kind == MODULE else _path_in(pattern)
            inside = bool(path) and is_within(module, path)
            if inside or _is_named(pattern, kind, name, text) or _is_of_name(pattern, kind, name):
                self.matched.add(pattern)
                found = True
        return found


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


def _is_itself(pattern: str, kind: str, name: str, text: str) -> bool:
    """Whether a pattern is one call of a name, and not all of them."""
    return _is_named(pattern, kind, name, text) and not _is_of_name(pattern, kind, name)


def _path_in(pattern: str) -> str:
    """The path of a module that a pattern may be, or nothing."""
    head, dot, rest = pattern.partition(".")
    return rest if head == MODULE else pattern if dot and head not in _KINDS else ""


def _holds(numbers: Numbers, number: int) -> bool:
    return not numbers or any(
        item == number if isinstance(item, int) else item[0] <= number <= item[1] for item in numbers
    )
