"""A function whose code is exchanged stays the same object, and is as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ulpscope.frameworks.torch.codeswap import CodeSwap


def plain(one: int, two: int = 7, *, three: int = 3) -> tuple[int, int, int]:
    return one, two, three


def around(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return "ours", original(*args, **kwargs)


def test_a_function_is_exchanged_and_put_back_as_often_as_one_likes() -> None:
    code = plain.__code__
    swap = CodeSwap(plain, around)
    for _ in range(3):
        swap.install()
        assert plain(1) == plain(one=1) == ("ours", (1, 7, 3))
        swap.remove()
        swap.remove()
        assert plain(1, 2) == (1, 2, 3) and plain.__code__ is code


def test_defaults_that_were_changed_meanwhile_count() -> None:
    swap = CodeSwap(plain, around)
    defaults, named = plain.__defaults__, plain.__kwdefaults__
    swap.install()
    swap.remove()
    try:
        plain.__defaults__, plain.__kwdefaults__ = (8,), {"three": 4}
        swap.install()
        assert plain(1) == ("ours", (1, 8, 4))
        swap.remove()
        assert plain(1) == (1, 8, 4)
    finally:
        plain.__defaults__, plain.__kwdefaults__ = defaults, named


def test_a_call_that_began_before_goes_to_the_original() -> None:
    swap = CodeSwap(plain, around)
    swap.install()
    exchanged = plain.__code__
    swap.remove()
    left_over = type(plain)(exchanged, plain.__globals__)
    assert left_over(1) == (1, 7, 3)
