"""Records made without their __init__ are the same records."""

from __future__ import annotations

import dataclasses
import gc
import sys

import pytest

from ulpscope.making import HAVE_EXTENSION, maker
from ulpscope.records import CallId, Phase, Role, Slot, Value

needs_extension = pytest.mark.skipif(not HAVE_EXTENSION, reason="the C extension was not built")


def test_a_made_record_equals_one_from_the_class() -> None:
    made = maker(CallId)("Functional", "conv2d", 3, Phase.FORWARD, 0)
    assert type(made) is CallId
    assert made == CallId("Functional", "conv2d", 3, Phase.FORWARD)
    assert hash(made) == hash(CallId("Functional", "conv2d", 3, Phase.FORWARD))
    assert repr(made) == repr(CallId("Functional", "conv2d", 3, Phase.FORWARD))


def test_a_made_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        maker(Slot)(Role.INPUT, (0,)).path = ()  # type: ignore[misc]


@needs_extension
@pytest.mark.parametrize("fields", [(), (Role.INPUT,), (Role.INPUT, (), 1)])
def test_another_number_of_fields_is_an_error(fields: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="2 fields were expected"):
        maker(Slot)(*fields)  # type: ignore[arg-type]


@needs_extension
def test_a_class_without_slots_is_an_error() -> None:
    @dataclasses.dataclass
    class Loose:
        field: int = 0

    with pytest.raises(TypeError, match="has no slot"):
        maker(Loose)


def test_a_made_record_holds_its_fields_and_lets_go_of_them() -> None:
    path = ("a name of its own", 7)
    before = sys.getrefcount(path)
    made = maker(Slot)(Role.INPUT, path)
    assert made.path is path
    assert gc.is_tracked(made) == gc.is_tracked(Slot(Role.INPUT, path))
    del made
    assert sys.getrefcount(path) == before
    make = maker(Value)
    del make
