"""Reading a dataclass back from the JSON it was written as: every field is there, known and of its kind, or ValueError.

What is read from a file was written by anybody. Nothing downstream asks again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

_LARGEST = 1 << 63
Check = Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_table(value: Any) -> bool:
    return type(value) is dict


def _all(check: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _is_source(value: Any) -> bool:
    kinds = (_is_text, _is_int, _is_text)
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(kind(item) for kind, item in zip(kinds, value, strict=True))
    )


_CHECKS: dict[str, Check] = {
    "None": lambda value: value is None,
    "int": _is_int,
    "float": _is_number,
    "str": _is_text,
    "bool": lambda value: type(value) is bool,
    "dict[str, Any]": _is_table,
    "tuple[int, ...]": _all(_is_int),
    "tuple[float, ...]": _all(_is_number),
    "tuple[str, ...]": _all(_is_text),
    "tuple[str, int, str]": _is_source,
}


@functools.cache
def _checks(kind: type) -> tuple[dict[str, Check], frozenset[str]]:
    """The check of each field that is plain, and the fields that must be there."""
    found: dict[str, Check] = {}
    needed = set()
    for field in dataclasses.fields(kind):
        words = str(field.type).split(" | ")
        if all(word in _CHECKS for word in words):
            found[field.name] = _any([_CHECKS[word] for word in words])
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            needed.add(field.name)
    return found, frozenset(needed)


def _any(checks: list[Check]) -> Check:
    return checks[0] if len(checks) == 1 else lambda value: any(check(value) for check in checks)


def read_fields(kind: type, plain: Any, made: dict[str, Any] | None = None) -> Any:
    """An object of `kind` from its fields. `made` are those that are no plain data, read by the caller."""
    made = made or {}
    if type(plain) is not dict:
        raise ValueError(f"{type(plain).__name__} is no table")
    checks, needed = _checks(kind)
    if not needed <= plain.keys() | made.keys():
        raise ValueError(f"{', '.join(sorted(needed - plain.keys()))} is missing")
    given: dict[str, Any] = {}
    for name, value in plain.items():
        if name in made:
            continue
        check = checks.get(name)
        if check is None or not check(value):
            raise ValueError(f"{name!r} cannot be {value!r:.80}")
        given[name] = tuple(value) if isinstance(value, list) else value
    return kind(**given, **made)
