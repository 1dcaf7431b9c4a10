"""Memory that nobody has written is unknown wherever it is read, until calls have filled it; then it is measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ulpscope
from ulpscope.frameworks.torch.unwritten import UNSURE
from ulpscope.model.records import UNWRITTEN, Role
from ulpscope.native import taps

ZEROS = torch.zeros(4)


@pytest.fixture(params=["c", "python"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    if request.param == "c" and taps.C is None:
        pytest.skip("the extension was not built")
    if request.param == "python":
        monkeypatch.setattr(taps, "C", None)

    def record(program: Callable[[], Any], level: str = "op") -> ulpscope.Dump:
        with ulpscope.capture(tmp_path / "run", level=level):
            program()
        return ulpscope.open_dump(tmp_path / "run")

    return record


def errors(dump: Any, name: str, index: int = 0) -> tuple[list[str | None], list[str | None]]:
    """Why the tensors are not known that went into a call, and that came out."""
    (call,) = (
        each
        for each in dump.calls()
        if each.id.name == name and each.id.index == index and each.id.phase.value == "forward"
    )
    found = [(value.slot.role is Role.OUTPUT, value.error) for value in call.values if value.is_tensor]
    assert all(value.error or value.stats is not None for value in call.values if value.is_tensor)
    return [why for out, why in found if not out], [why for out, why in found if out]


def test_a_parameter_and_a_view_of_it_are_unknown_until_it_is_filled(recorded: Any) -> None:
    def program() -> None:
        weight = nn.Parameter(torch.empty(4, 2))
        view = weight.detach()[1:]
        view.square()
        nn.init.kaiming_uniform_(weight)
        view.exp()

    dump = recorded(program)
    assert errors(dump, "__getitem__") == ([UNWRITTEN], [UNWRITTEN])
    assert errors(dump, "square")[0] == [UNWRITTEN]
    assert errors(dump, "kaiming_uniform_") == ([UNWRITTEN], [None])
    assert errors(dump, "exp") == ([None], [None])


def test_columns_are_known_when_they_are_written_and_the_whole_when_all_are(recorded: Any) -> None:
    def program() -> None:
        k = torch.empty(4, 3)
        for column in range(3):
            k[..., column] = ZEROS
            k[..., : column + 1].sum(-1)
        k.exp()

    dump = recorded(program)
    assert [errors(dump, "__setitem__", at) for at in range(3)] == [
        ([UNWRITTEN, None], [UNWRITTEN]), ([UNWRITTEN, None], [UNWRITTEN]), ([UNWRITTEN, None], [None]),
    ]  # fmt: skip
    assert [errors(dump, "sum", at) for at in range(3)] == [([None], [None])] * 3
    assert errors(dump, "exp") == ([None], [None])


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("__setitem__", lambda x, at: x.__setitem__(torch.tensor(at), 1.0)),
        ("__setitem__", lambda x, at: x.__setitem__([each in at for each in range(4)], 1.0)),
        ("index_copy_", lambda x, at: x.index_copy_(0, torch.tensor(at), ZEROS[:2])),
        ("index_fill_", lambda x, at: x.index_fill_(0, torch.tensor(at), 1.0)),
        ("index_put_", lambda x, at: x.index_put_((torch.tensor(at),), ZEROS[:2])),
        ("scatter_", lambda x, at: x.scatter_(0, torch.tensor(at), ZEROS)),
        ("masked_fill_", lambda x, at: x.masked_fill_(torch.tensor([each in at for each in range(4)]), 1.0)),
        ("masked_scatter_", lambda x, at: x.masked_scatter_(torch.tensor([each in at for each in range(4)]), ZEROS)),
        ("copy_", lambda x, at: x[at[0] : at[1] + 1].copy_(ZEROS[:2])),
        ("fill_", lambda x, at: x.data[at[0] : at[1] + 1].fill_(2.0)),
    ],
)  # fmt: skip
def test_a_write_by_index_fills_what_it_says(
    recorded: Any, name: str, half: Callable[[Tensor, list[int]], Any]
) -> None:
    def program() -> None:
        x = torch.empty(4)
        half(x, [2, 3])
        x.exp(), x[2:].exp()
        half(x, [0, 1])
        x.exp()

    dump = recorded(program)
    assert [errors(dump, "exp", at)[0] for at in range(3)] == [[UNWRITTEN], [None], [None]]


def test_reading_it_in_place_fills_nothing_and_out_does(recorded: Any) -> None:
    def program() -> None:
        x = torch.empty(4)
        x.add_(1)
        torch.exp(ZEROS, out=x)
        x.sin()

    dump = recorded(program)
    assert errors(dump, "add_") == ([UNWRITTEN], [UNWRITTEN])
    assert errors(dump, "exp") == ([None, UNWRITTEN], [None])
    assert errors(dump, "sin") == ([None], [None])


def test_a_copy_of_it_is_as_unknown_as_it_is(recorded: Any) -> None:
    def program() -> None:
        x, y = torch.empty(4), torch.ones(4)
        x.clone().sin()
        torch.empty(4).copy_(x).sin()
        y.clone().sin()

    dump = recorded(program)
    assert [errors(dump, "sin", at)[0] for at in range(3)] == [[UNWRITTEN], [UNWRITTEN], [None]]


def test_what_is_shared_or_written_unseen_is_measured(recorded: Any) -> None:
    def program() -> None:
        x, y = torch.empty(4), torch.empty(4)
        x.numpy()[:] = 3
        x.sin()
        with torch._C.DisableTorchFunction():
            y.copy_(ZEROS)  # as a compiled region does
        y.sin()

    dump = recorded(program)
    assert [errors(dump, "sin", at) for at in range(2)] == [([None], [None])] * 2


def test_memory_that_is_given_back_and_taken_anew_is_another(recorded: Any) -> None:
    def program() -> None:
        for _ in range(20):
            x = torch.empty(1000)
            del x
            torch.ones(1000).sin()

    dump = recorded(program)
    assert all(errors(dump, "sin", at) == ([None], [None]) for at in range(20))


def test_a_write_that_cannot_be_followed_is_unknown_and_not_clean(recorded: Any) -> None:
    def program() -> None:
        x = torch.empty(4)
        x.view(torch.int32)[:] = 1  # an index of one dtype, the elements of another
        x.view(torch.float16)[:2] = 1
        y = torch.empty(4)
        y.view(torch.float16)[:2] = 1
        x.sin(), y.sin()

    dump = recorded(program)
    assert errors(dump, "sin") == ([None], [None])
    assert errors(dump, "sin", 1)[0] == [UNSURE]


def test_kernels_fill_what_their_schema_says(recorded: Any) -> None:
    def program() -> None:
        k = torch.empty(4, 2)
        k[:, 0] = ZEROS
        k.sin()
        k[:, 1] = ZEROS
        k.sin()

    dump = recorded(program, "kernel")
    assert [errors(dump, "sin", at)[0] for at in range(2)] == [[UNWRITTEN], [None]]
    assert [errors(dump, "sin.default", at)[0] for at in range(2)] == [[UNWRITTEN], [None]]


def test_a_parameter_that_has_no_shape_yet_is_unwritten(recorded: Any) -> None:
    dump = recorded(lambda: torch.nn.LazyLinear(2).weight.to(torch.float32))
    (call,) = (each for each in dump.calls() if each.id.name == "to")
    assert {value.error for value in call.values if "Uninitialized" in value.type} == {UNWRITTEN}
