"""The three programs that are timed. Each is an object with a `model` and a `step()`, seeded, float32, on the CPU."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 1000


class Workload(Protocol):
    model: nn.Module

    def step(self) -> None: ...


class Llama:
    """A whole training step of a small language model: few calls, each on a large tensor."""

    def __init__(self, layers: int = 8, tokens: int = 256) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=8000,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=512,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config).train()
        self._tokens = torch.randint(0, 8000, (2, tokens))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self.model(input_ids=self._tokens, labels=self._tokens).loss.backward()
        self._optimizer.step()


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(channels, width, 1)
        self.conv2, self.norm2 = _convolution(width, width, 3, stride)
        self.conv3, self.norm3 = _convolution(width, 4 * width, 1)
        same = stride == 1 and channels == 4 * width
        self.shortcut = None if same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet50:
    """Forward and backward of an image model: convolutions, normalisation, in-place calls."""

    def __init__(self, batch: int = 4, size: int = 128) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for stage, blocks in enumerate((3, 4, 6, 3)):
            width = 64 << stage
            for block in range(blocks):
                layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = 4 * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
        self.model = nn.Sequential(*layers).train()
        self._images = torch.randn(batch, 3, size, size)
        self._labels = torch.randint(0, CLASSES, (batch,))

    def step(self) -> None:
        self.model.zero_grad()
        functional.cross_entropy(self.model(self._images), self._labels).backward()


class TenCalls(nn.Module):
    """Ten elementwise calls: operators, methods, `torch.*` and `torch.nn.functional.*`."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(elements))
        self.shift = nn.Parameter(0.1 * torch.randn(elements))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.scale + self.shift)
        x = torch.sigmoid(functional.silu(x - 0.1))
        x = torch.sin(x * 2.0)
        return functional.relu(x.add(0.5))


class Tiny:
    """Thousands of calls on a thousand elements each: what remains is the cost of a record."""

    def __init__(self, calls: int = 3000, elements: int = 1000) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(TenCalls(elements) for _ in range(calls // 10))).train()
        self._x = torch.randn(elements)

    def step(self) -> None:
        self.model.zero_grad()
        self.model(self._x).sum().backward()


WORKLOADS: dict[str, Any] = {"llama": Llama, "resnet50": ResNet50, "tiny": Tiny}


def _convolution(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)
