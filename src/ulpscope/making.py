"""Frozen records made hundreds of thousands of times: the same object as from the class, at a quarter of the cost.

    make_slot = maker(Slot)
    make_slot(Role.INPUT, (0,))

All fields are given, in their order and without names: defaults and `__post_init__` are not looked at. Where the C extension
could not be built, the function is the class itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

try:
    from ulpscope import _making

    HAVE_EXTENSION = True
except ImportError:
    HAVE_EXTENSION = False

_Fields = ParamSpec("_Fields")
_Record = TypeVar("_Record")


def maker(kind: Callable[_Fields, _Record]) -> Callable[_Fields, _Record]:
    """A function that makes objects of a slotted dataclass from all their fields; TypeError for a class of another kind."""
    fields = dataclasses.fields(cast(Any, kind))
    return _making.maker(kind, tuple(field.name for field in fields)) if HAVE_EXTENSION else kind
