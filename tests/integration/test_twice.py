"""One program recorded twice agrees with itself, whoever wins its races."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ulpscope
from ulpscope.api.comparing import compare
from ulpscope.native import taps
from ulpscope.report.outcome import Answer, Outcome

DRAWN = random.SystemRandom()


@pytest.fixture(params=["c", "python"])
def twice(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    if request.param == "c" and taps.C is None:
        pytest.skip("the extension was not built")
    if request.param == "python":
        monkeypatch.setattr(taps, "C", None)

    def record(program: Callable[[], Any]) -> Outcome:
        for name in ("reference", "target"):
            torch.manual_seed(0)
            with ulpscope.capture(tmp_path / name, level="mix"):
                program()
        outcome = compare(tmp_path / "reference", tmp_path / "target")
        return outcome

    return record


def slowly(x: Tensor) -> Tensor:
    time.sleep(DRAWN.random() * 0.02)
    return x.clone().mul(2)


def test_the_tasks_of_a_pool_are_told_apart_by_where_they_were_begun(twice: Any) -> None:
    def program() -> None:
        with ThreadPoolExecutor(3) as pool:
            given = [torch.full((4,), float(at)) for at in range(12)]
            nn.Linear(4, 1)(torch.stack(list(pool.map(slowly, given))))

    outcome = twice(program)
    assert outcome.answer is Answer.AGREES
    assert outcome.alone == (0, 0)


def test_threads_are_numbered_as_they_were_begun(twice: Any) -> None:
    def program() -> None:
        threads = [threading.Thread(target=slowly, args=(torch.full((4,), float(at)),)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert twice(program).answer is Answer.AGREES


class _Slow(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> Tensor:
        time.sleep(DRAWN.random() * 0.01)
        return torch.full((4,), float(at))


def test_whose_batch_is_unpickled_first_is_not_recorded(twice: Any, tmp_path: Path) -> None:
    def program() -> None:
        net = nn.Linear(4, 1)
        for x in torch.utils.data.DataLoader(_Slow(), batch_size=2, num_workers=2):
            net(x).sum()

    outcome = twice(program)
    assert outcome.answer is Answer.AGREES
    names = [call.id.name for call in ulpscope.open_dump(tmp_path / "target").calls()]
    assert names.count("linear") == 8
    assert names.count("empty") == 3, "of the layer and of the loader's own seed"


class Noisy(TorchDispatchMode):
    """Products are rounded another way each time, as sums are that a device adds in no fixed order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            drawn = [DRAWN.choice((-1.0, 0.0, 1.0)) for _ in range(result.numel())]
            factors = 1 + torch.tensor(drawn, dtype=torch.float64).reshape(result.shape) * torch.finfo(result.dtype).eps
            result = (result.double() * factors).to(result.dtype)
        return result


def test_a_training_that_rounds_otherwise_each_time_agrees_and_says_who_does(twice: Any) -> None:
    def program() -> None:
        net = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(4)), nn.Linear(32, 1)
        )
        optimizer = torch.optim.AdamW(net.parameters())
        x = torch.randn(8, 32)
        for _ in range(4):
            optimizer.zero_grad()
            with Noisy():
                net(x).square().mean().backward()
            optimizer.step()

    outcome = twice(program)
    assert outcome.answer is Answer.AGREES
    assert any("`linear` adds in another order each time" in told for _, (_, told) in outcome.remarks)


def test_another_token_of_two_that_tie_is_told_as_that(twice: Any) -> None:
    def program() -> None:
        head, embedding = nn.Linear(16, 8), nn.Embedding(8, 16)
        with torch.no_grad():
            head.weight.copy_(head.weight[:1].expand(8, 16)), head.bias.fill_(0.0)
            tokens = torch.zeros(1, dtype=torch.int64)
            for _ in range(8):
                with Noisy():
                    tokens = head(embedding(tokens[-1:])).argmax(-1)

    outcome = twice(program)
    assert outcome.answer is Answer.INCOMPLETE
    assert outcome.choice.comparison.match.call.id.name == "argmax"
    assert outcome.first is None
