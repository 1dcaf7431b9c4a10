"""Tensors that are more than their elements: indices, offsets, sizes, masks and scales belong to the value."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ulpscope
from integration.runs import LEVELS
from ulpscope.compare.comparison import Comparison, Evidence, Level
from ulpscope.compare.engine import Options, compare_dumps
from ulpscope.model.records import Value
from ulpscope.store.convert import write_native

VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Passing(nn.Module):
    def forward(self, *given: Any) -> Any:
        return given


def coo(rows: list[int]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows, [0, 1, 2, 3]]), VALUES, (6, 6))


def csr(rows: list[int], layout: torch.layout = torch.sparse_csr) -> Tensor:
    make = {torch.sparse_csr: torch.sparse_csr_tensor, torch.sparse_csc: torch.sparse_csc_tensor}[layout]
    return make(torch.tensor(rows), torch.tensor([0, 1, 0, 1]), VALUES, (3, 3))


def bsr(columns: list[int]) -> Tensor:
    return torch.sparse_bsr_tensor(torch.tensor([0, 1]), torch.tensor(columns), VALUES.view(1, 2, 2), (2, 4))


def bsc(rows: list[int]) -> Tensor:
    return torch.sparse_bsc_tensor(torch.tensor([0, 1]), torch.tensor(rows), VALUES.view(1, 2, 2), (4, 2))


def jagged(offsets: list[int], lengths: list[int] | None = None) -> Tensor:
    given = None if lengths is None else torch.tensor(lengths)
    data = torch.arange(12.0).view(6, 2)
    return torch.nested.nested_tensor_from_jagged(data, torch.tensor(offsets), given)


def nested(first: int) -> Tensor:
    whole = torch.arange(12.0).view(6, 2)
    return torch.nested.nested_tensor([whole[:first], whole[first:]])


def per_tensor(scale: float, zero_point: int) -> Tensor:
    return torch.quantize_per_tensor(torch.zeros(3), scale, zero_point, torch.qint8)


def per_channel(scales: list[float], zeros: list[int], axis: int = 0) -> Tensor:
    return torch.quantize_per_channel(torch.zeros(2, 2), torch.tensor(scales), torch.tensor(zeros), axis, torch.qint8)


def masked(mask: list[bool]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.tensor([0.0, 1.0]), torch.tensor(mask))


# The elements are the same on both sides, what they mean is not.
PAIRS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], str]] = {
    "coo indices": (lambda: coo([0, 1, 2, 3]), lambda: coo([5, 1, 2, 3]), "other indices"),
    "csr rows": (lambda: csr([0, 2, 3, 4]), lambda: csr([0, 2, 2, 4]), "other crow_indices"),
    "csc columns": (
        lambda: csr([0, 2, 3, 4], torch.sparse_csc),
        lambda: csr([0, 2, 2, 4], torch.sparse_csc),
        "other ccol_indices",
    ),
    "bsr columns": (lambda: bsr([0]), lambda: bsr([1]), "other col_indices"),
    "bsc rows": (lambda: bsc([0]), lambda: bsc([1]), "other row_indices"),
    "one layout and another": (
        lambda: csr([0, 2, 3, 4]), lambda: csr([0, 2, 3, 4], torch.sparse_csc), "stored by other parts",
    ),
    "jagged offsets": (lambda: jagged([0, 2, 6]), lambda: jagged([0, 4, 6]), "other offsets"),
    "jagged lengths": (lambda: jagged([0, 3, 6], [1, 3]), lambda: jagged([0, 3, 6], [2, 3]), "other lengths"),
    "nested sizes": (lambda: nested(2), lambda: nested(3), "other sizes"),
    "scale": (lambda: per_tensor(1.0, 0), lambda: per_tensor(2.0, 0), "scale 1.0 in the reference, 2.0 in the target"),
    "zero point": (lambda: per_tensor(1.0, 0), lambda: per_tensor(1.0, 3), "zero_point 0 in the reference, 3 in the target"),
    "scales": (lambda: per_channel([1.0, 2.0], [0, 0]), lambda: per_channel([1.0, 3.0], [0, 0]), "other scales"),
    "zero points": (lambda: per_channel([1.0, 2.0], [0, 0]), lambda: per_channel([1.0, 2.0], [0, 1]), "other zero_points"),
    "axis": (lambda: per_channel([1.0, 2.0], [0, 0]), lambda: per_channel([1.0, 2.0], [0, 0], 1), "axis 0 in the reference"),
    "mask": (lambda: masked([True, True]), lambda: masked([False, True]), "other mask"),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "tensors": {"tensors": True},
    "checksum": {"statistics": False, "sketch": False, "checksum": True},
    "statistics": {"sketch": False},
}


def dump_of(value: Tensor, path: Path, **options: Any) -> ulpscope.Dump:
    model = Passing()
    with ulpscope.capture(path, model=model, level="module", **options):
        model(value)
    return ulpscope.open_dump(path)


def first(reference: ulpscope.Dump, target: ulpscope.Dump) -> Comparison:
    return next(each for call in compare_dumps(reference, target, Options(jobs=1)) for each in call.values)


def recorded(dump: ulpscope.Dump) -> Value:
    return next(value for call in dump.calls() for value in call.values)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_equal_elements_in_other_places_are_different(pair: str, options: str, tmp_path: Path) -> None:
    one, other, why = PAIRS[pair]
    reference = dump_of(one(), tmp_path / "a", **OPTIONS[options])
    again = dump_of(one(), tmp_path / "b", **OPTIONS[options])
    target = dump_of(other(), tmp_path / "c", **OPTIONS[options])
    found = first(reference, target)
    assert found.verdict.level is Level.FAIL and why in found.verdict.text, found.verdict
    assert first(reference, again).verdict.level is Level.PASS


@pytest.mark.parametrize("pair", PAIRS)
def test_a_checksum_covers_all_parts_also_in_a_copy(pair: str, tmp_path: Path) -> None:
    one, other, _ = PAIRS[pair]
    values = [
        recorded(dump_of(make(), tmp_path / name, checksum=True))
        for name, make in (("a", one), ("b", one), ("c", other))
    ]
    assert values[0].checksum == values[1].checksum is not None
    assert values[0].checksum != values[2].checksum
    write_native(ulpscope.open_dump(tmp_path / "a"), tmp_path / "copy")
    copied = recorded(ulpscope.open_dump(tmp_path / "copy"))
    assert (copied.checksum, copied.extra) == (values[0].checksum, values[0].extra)
    assert [name for name, _ in copied.parts] == [name for name, _ in values[0].parts]
    assert first(ulpscope.open_dump(tmp_path / "a"), ulpscope.open_dump(tmp_path / "copy")).verdict.level is Level.PASS


@pytest.mark.parametrize("pair", PAIRS)
def test_a_shape_is_made_of_numbers_that_can_be_sizes(pair: str, tmp_path: Path) -> None:
    value = recorded(dump_of(PAIRS[pair][0](), tmp_path / "run"))
    assert value.error is None and value.measure is not None
    for each in (value, *(part for _, part in value.parts)):
        assert each.shape is not None and all(type(size) is int and size >= 0 for size in each.shape)


def test_with_tensors_the_dump_holds_the_parts_too(tmp_path: Path) -> None:
    dump = dump_of(coo([5, 1, 2, 3]), tmp_path / "run", tensors=True)
    value = recorded(dump)
    assert dump.load(value).tolist() == VALUES.tolist()
    assert {name: dump.load(part).tolist() for name, part in value.parts} == {"indices": [[5, 1, 2, 3], [0, 1, 2, 3]]}
    assert value.extra["nnz"] == 4


@pytest.mark.parametrize("level", LEVELS)
def test_an_uncoalesced_tensor_stays_uncoalesced(level: str, tmp_path: Path) -> None:
    value = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2))
    model = Passing()
    with ulpscope.capture(tmp_path / "run", model=model, level=level):
        model(value)
        summed = torch.sparse.sum(value)
    assert not value.is_coalesced() and value._nnz() == 2 and value._values().tolist() == [1.0, 2.0]
    assert summed.item() == 3.0


def test_what_cannot_be_measured_is_unknown_not_equal(tmp_path: Path) -> None:
    dumps = [
        dump_of(make(), tmp_path / name, statistics=False, sketch=False, tensors=False)
        for name, make in (("a", PAIRS["coo indices"][0]), ("b", PAIRS["coo indices"][1]))
    ]
    assert first(*dumps).verdict.level is Level.UNKNOWN
    assert first(*dumps).evidence is Evidence.NOTHING


@pytest.mark.parametrize("level", ["op", "mix", "kernel"])
def test_zeros_without_memory_are_zeros(level: str, tmp_path: Path) -> None:
    """torch gives a gradient that is zero whatever comes as such a tensor."""
    data = torch.ones(3, requires_grad=True)
    with ulpscope.capture(tmp_path / "a", level=level):
        data.sgn().sum().backward()
    dump = ulpscope.open_dump(tmp_path / "a")
    gradient = dump.call("Tensor.sgn.0.backward").values[-1]
    assert gradient.error is None and gradient.stats is not None
    assert (gradient.stats.max, gradient.stats.norm, gradient.stats.zero_count) == (0.0, 0.0, 3)
    assert data.grad is not None and data.grad._is_zerotensor()  # as without us
