"""Two different programs that compute one function: they agree when both are right, and the one mistake is named when one has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

import ulpscope
from ulpscope.cli.main import cli

WIDTH, HEADS, LAYERS = 32, 4, 3


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


class Separate(nn.Module):
    """Attention by a product, a softmax and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(each(x)) for each in (self.q, self.k, self.v))
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5 + mask, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Fused(nn.Module):
    """The same by one product for q, k and v, and one call for the rest. `wrong` is put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wrong = ""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(each) for each in self.qkv(x).chunk(3, -1))
        scale = 0.4 if self.wrong == "scale" else None
        made = F.scaled_dot_product_attention(q, k, v, is_causal=self.wrong != "mask", scale=scale)
        made = made.transpose(1, 2)
        if self.wrong == "order":
            made = made.flip(2)
        return self.proj(made.reshape(x.shape))


class Layer(nn.Module):
    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix, self.up, self.down = nn.LayerNorm(WIDTH), mix, nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, mix: Callable[[], nn.Module], name: str) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(Layer(mix()) for _ in range(LAYERS)))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        for layer in getattr(self, self.name):
            x = layer(x)
        return x


def separate() -> Model:
    torch.manual_seed(0)
    return Model(Separate, "layers")


def fused() -> Model:
    """With the weights of the other."""
    model, other = Model(Fused, "stack"), separate()
    for mine, theirs in zip(model.stack, other.layers, strict=True):
        for name in ("norm", "up", "down"):
            getattr(mine, name).load_state_dict(getattr(theirs, name).state_dict())
        with torch.no_grad():
            for part in ("weight", "bias"):
                joined = torch.cat([getattr(getattr(theirs.mix, name), part) for name in "qkv"])
                getattr(mine.mix.qkv, part).copy_(joined)
        mine.mix.proj.load_state_dict(theirs.mix.out.state_dict())
    return model


def train(folder: Path, model: nn.Module, parts: int = 1, steps: int = 1, level: str = "mix", **options: Any) -> Path:
    """Steps of AdamW; a batch in so many parts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    batches = torch.Generator().manual_seed(1)
    with ulpscope.capture(folder, model=model, level=level) as capture:
        for _ in range(steps):
            x = torch.randn(4, 8, WIDTH, generator=batches)
            for part in x.chunk(parts):
                (model(part).square().mean() / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return folder


def compared(reference: Path, target: Path) -> tuple[int, dict[str, Any], str]:
    found = CliRunner().invoke(cli, ["compare", str(reference), str(target), "--format", "json"])
    text = CliRunner().invoke(cli, ["compare", str(reference), str(target)]).output
    return found.exit_code, json.loads(found.output), text


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("two") / "r", separate())


@pytest.mark.parametrize("level", ["mix", "op"])
def test_another_implementation_under_other_names_agrees(level: str, tmp_path: Path) -> None:
    runs = train(tmp_path / "r", separate(), level=level), train(tmp_path / "t", fused(), level=level)
    code, found, text = compared(*runs)
    assert (code, found["verdict"], found["first"]) == (0, "agrees", None)
    assert "come to the same values" in text
    assert found["modules"]["stack.2.mix"] == "layers.2.mix"
    assert found["modules"]["stack.0.mix.proj"] == "layers.0.mix.out"


@pytest.mark.parametrize("wrong", ["scale", "mask", "order"])
def test_a_mistake_in_another_implementation_is_named_with_both_sides_calls(
    wrong: str, reference: Path, tmp_path: Path
) -> None:
    model = fused()
    model.stack[1].mix.wrong = wrong
    code, found, text = compared(reference, train(tmp_path / "t", model))
    first = found["first"]
    assert (code, found["verdict"], first["module"]) == (1, "differs", "stack.1.mix")
    assert first["call"].startswith(("Functional.scaled_dot_product_attention.1", "Tensor.flip.0"))
    assert any(call["call"] == first["call"] for call in first["region"]["target"])
    assert "test_two_programs.py" in text


def test_weights_that_were_put_at_the_wrong_place_are_named(reference: Path, tmp_path: Path) -> None:
    model = separate()
    mix = model.layers[1].mix
    mix.q, mix.v = mix.v, mix.q
    code, found, _ = compared(reference, train(tmp_path / "t", model))
    assert code == 1
    assert found["first"]["module"] in ("layers.1.mix.q", "layers.1.mix.v")


def test_an_optimizer_that_goes_through_its_parameters_otherwise_agrees(tmp_path: Path) -> None:
    runs = (train(tmp_path / name, separate(), steps=2, foreach=name == "r") for name in ("r", "t"))
    code, found, _ = compared(*runs)
    assert (code, found["first"]) == (0, None)
    assert found["counts"]["only_target"]


def test_a_batch_in_parts_agrees(reference: Path, tmp_path: Path) -> None:
    code, found, _ = compared(reference, train(tmp_path / "t", separate(), parts=2))
    assert (code, found["first"]) == (0, None)


def test_a_mistake_in_the_gradients_alone_is_named(reference: Path, tmp_path: Path) -> None:
    model = fused()
    forward = model.stack[1].up.forward
    model.stack[1].up.forward = lambda x: forward(x).clone().detach() * 0.5 + forward(x) * 0.5
    code, found, _ = compared(reference, train(tmp_path / "t", model))
    assert code == 1
    assert found["first"]["module"].startswith("stack.1")


def test_the_correspondence_alone(reference: Path, tmp_path: Path) -> None:
    target = train(tmp_path / "t", fused())
    told = CliRunner().invoke(cli, ["map", str(reference), str(target)])
    assert told.exit_code == 0
    assert "stack.2.mix.proj  is layers.2.mix.out" in told.output
    found = json.loads(CliRunner().invoke(cli, ["map", str(reference), str(target), "--format", "json"]).output)
    assert found["modules"]["stack.1"] == "layers.1"
    assert set(found["only_reference"]) >= {"layers.0.mix.q", "layers.0.mix.k", "layers.0.mix.v"}
