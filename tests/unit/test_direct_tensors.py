"""Tensors that C asks without Python: only where each of thirteen samples was told the same as by Python."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from ulpscope.frameworks.torch import direct, internals
from ulpscope.native import taps

pytestmark = pytest.mark.skipif(taps.C is None, reason="the extension was not built")


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    yield
    direct.check.cache_clear()
    direct.check()


def test_a_torch_that_we_know_is_asked_without_python() -> None:
    assert direct.check() is (internals.native() == "full")


WRONG = {
    "address": (1, lambda value: value + 8),
    "requires_grad": (2, lambda value: not value),
    "version": (3, lambda value: value + 1),
    "is_view": (4, lambda value: not value),
    "data_ptr": (5, lambda value: value + 1),
    "dtype": (6, lambda value: torch.int8),
    "shape": (7, lambda value: (*value, 1)),
    "stride": (8, lambda value: value[1:] or (7,)),
    "offset": (9, lambda value: value + 1),
    "device": (10, lambda value: value + 1),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("sample", [0, 3, -1])
def test_one_answer_that_differs_is_enough(what: str, sample: int) -> None:
    samples = direct.samples()
    place, changed = WRONG[what]
    one = list(samples[sample])
    one[place] = changed(one[place])
    samples[sample] = tuple(one)
    assert len(samples) == 13
    assert taps.C is not None
    assert not taps.C.check_torch(samples)


def test_the_check_calls_no_hook_of_the_program() -> None:
    def refuse(_: object) -> object:
        raise AssertionError("nothing is to be kept for a backward pass")

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        direct.samples()


def odd_tensors() -> None:
    """What has the same form and is not the same: views, conjugates, inference, transforms, classes; nested, sparse and dead ones."""
    base = torch.arange(24.0).reshape(4, 6).requires_grad_()
    total = (base[1:, ::2] * base[:3, :3]).sum() + base.t()[2].pow(2).sum()
    wave = torch.complex(base.detach(), base.detach() + 1)
    total = total + (wave.conj() * wave).real.sum() + (wave.conj().imag + 1).sum()
    total = total + (wave.conj().imag.detach() * 2).sum()
    total = total + sum(part.mean() for part in base.unbind()[1:])
    with torch.inference_mode():
        inferred = torch.ones(4, 6) * 2
    (inferred.view(24) + 1).sum()
    inferred.data = torch.zeros(4, 6)  # says that it has a version, and has none
    inferred + 1
    kept: list[Any] = []
    torch.vmap(lambda row: (kept.append(row), row * 2)[1])(base.detach())
    torch.empty(0, 6).sum()
    torch.zeros(3, dtype=torch.bfloat16).expand(5, 3).contiguous()
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).clone()
    torch.eye(3).to_sparse().coalesce().to_dense()
    with pytest.raises(RuntimeError):
        kept[0] * 2
    total.backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("level", ["op", "mix"])
def test_attributes_tell_the_same(tmp_path: Path, level: str, capfd: pytest.CaptureFixture[str]) -> None:
    def told(name: str) -> list[Any]:
        with ulpscope.capture(tmp_path / name, level=level, checksum=True):
            odd_tensors()
        dump = ulpscope.open_dump(tmp_path / name)
        return [
            (call.id, [(value.slot, value.dtype, value.shape, value.stats, value.error) for value in call.values])
            for call in dump.calls()
        ]

    found = told("direct")
    samples = direct.samples()
    assert taps.C is not None
    assert not taps.C.check_torch([(*samples[0][:3], samples[0][3] + 1, *samples[0][4:]), *samples[1:]])
    assert told("asked") == found
    assert len(found) > 40
    assert "aoti_torch" not in capfd.readouterr().err
