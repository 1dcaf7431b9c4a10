"""A function whose code is exchanged stays the same object, and is as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ulpscope.frameworks.torch.codeswap import PlainSwap


def plain(one: int, two: int = 7) -> tuple[int, int]:
    return one, two


def more(*args: int, **kwargs: int) -> tuple[int, ...]:
    return args


def named(one: int, *, two: int = 2) -> tuple[int, int]:
    return one, two


def with_closure() -> Callable[..., Any]:
    kept = 1
    return lambda one: (one, kept)


def marked(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: ("ours", original(*args))


def test_a_plain_function_is_exchanged_and_put_back() -> None:
    code = plain.__code__
    swap = PlainSwap(plain, marked)
    swap.install()
    assert plain(1) == plain(one=1) == ("ours", (1, 7))
    swap.remove()
    swap.remove()
    assert plain(1, 2) == (1, 2) and plain.__code__ is code


@pytest.mark.parametrize("function", [more, named, with_closure()])
def test_any_other_is_left_alone(function: Any) -> None:
    code, told = function.__code__, function(1)
    swap = PlainSwap(function, marked)
    swap.install()
    assert function(1) == told and function.__code__ is code
    swap.remove()
    assert function.__code__ is code
