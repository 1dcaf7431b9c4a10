"""Tiny models with fixed seeds, each with one training step. Run by the peers' Pythons and by ours, so: torch and transformers
only, nothing of ulpscope, and nothing random that a recorder could disturb."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], None]
Built = tuple[nn.Module, Step]

_SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _trained(model: nn.Module, loss: Callable[[], Tensor]) -> Built:
    """One step: forward, backward, optimizer. Plain loops in the optimizer: the fused ones are one call with 1000 arguments."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return model.train(), step


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers


def _language_model(model: nn.Module, **options: Any) -> Built:
    tokens = torch.randint(3, 32, (2, 7))
    return _trained(model, lambda: model(input_ids=tokens, labels=tokens, **options).loss)


def llama() -> Built:
    """Rotary embedding, grouped heads, fused attention."""
    t = _transformers()
    config = t.LlamaConfig(**_SMALL, num_key_value_heads=1, max_position_embeddings=32, use_cache=False)
    return _language_model(t.LlamaForCausalLM(config))


def gpt2() -> Built:
    """Conv1D (addmm), split heads, tanh gelu written out in operators."""
    t = _transformers()
    config = t.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    config.use_cache = False
    return _language_model(t.GPT2LMHeadModel(config))


def bert() -> Built:
    """Padding mask, pooled classifier. No Adam: the gradient of a key's bias is rounding alone, and Adam makes it as large as any."""
    t = _transformers()
    config = t.BertConfig(**_SMALL, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = t.BertForSequenceClassification(config)
    tokens, labels = torch.randint(3, 32, (2, 5)), torch.randint(3, (2,))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return _trained(model, lambda: model(input_ids=tokens, attention_mask=mask, labels=labels).loss)


def t5() -> Built:
    """Encoder and decoder, relative positions, one embedding used by three modules."""
    t = _transformers()
    config = t.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    model = t.T5ForConditionalGeneration(config)
    tokens, labels = torch.randint(3, 32, (2, 5)), torch.randint(3, 32, (2, 4))
    return _trained(model, lambda: model(input_ids=tokens, labels=labels).loss)


def vit() -> Built:
    """Patches by convolution, class token."""
    t = _transformers()
    options = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    config = t.ViTConfig(**options, image_size=8, patch_size=4, num_labels=3)
    model = t.ViTForImageClassification(config)
    pixels, labels = torch.randn(2, 3, 8, 8), torch.randint(3, (2,))
    return _trained(model, lambda: model(pixel_values=pixels, labels=labels).loss)


def mixtral() -> Built:
    """Routing: topk, indexing with tensors, index_add_."""
    t = _transformers()
    config = t.MixtralConfig(
        **_SMALL,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
        use_cache=False,
        experts_implementation="eager",
    )
    return _language_model(t.MixtralForCausalLM(config))


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += identity
        return self.relu(x)


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(_Block(4), _Block(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.pool(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet() -> Built:
    """In-place ReLU twice through the same module, `+=`, batch norm's running statistics."""
    model = _ResNet()
    images, labels = torch.randn(2, 3, 16, 16), torch.randint(3, (2,))
    return _trained(model, lambda: F.cross_entropy(model(images), labels))


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(10, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        y, (h, c) = self.lstm(self.embedding(tokens))
        hidden = torch.zeros(tokens.shape[0], 4)
        for at in range(tokens.shape[1]):
            hidden = self.cell(y[:, at], hidden)
        return self.out(hidden) + h.sum() * c.mean()


def lstm() -> Built:
    """VF.lstm, a cell called in a loop, a tuple inside an output tuple."""
    model = _Lstm()
    tokens, labels = torch.randint(11, (2, 3)), torch.randint(3, (2,))
    return _trained(model, lambda: F.cross_entropy(model(tokens), labels))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), diagonal=1)
        y, weights = self.attention(x, x, x, attn_mask=mask, need_weights=True)
        return self.act(self.norm(x + y)).mean() + weights.pow(2).sum()


def attention() -> Built:
    """nn.MultiheadAttention: one module that is a single API of many calls."""
    model = _Attention()
    x = torch.randn(2, 4, 8)
    return _trained(model, lambda: model(x))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.fc1(x))
        x = self.drop(x) * 1.0 + 0.0
        return 1 - self.fc2(x)


def mlp_bf16() -> Built:
    """bfloat16 weights and inputs; a dropout that both sides switch off."""
    model = _Mlp().bfloat16()
    x, labels = torch.randn(3, 6).bfloat16(), torch.randint(4, (3,))
    return _trained(model, lambda: F.cross_entropy(model(x).float(), labels))


class _Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.arange(12).reshape(3, 4))

    def forward(self, x: Tensor, *, keep: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
        y = self.linear(x) * self.scale
        picked = torch.where(keep[..., None], y, torch.zeros_like(y))
        order = torch.argsort(picked.sum(-1), dim=-1)
        largest, where = torch.max(y, dim=1)
        halves = torch.split(y, [2, 3], dim=-1)
        total = torch.cat([halves[1], halves[0]], dim=-1)
        counts = (self.table.float() @ x[0].t()).double().clamp(min=0.0)
        none = torch.empty(0).sum()
        total[:, 0] = total[:, 1] * 2
        flags = (largest > 0) & ~(where == 1)
        return {"y": total, "order": [order, where], "flags": flags, "rest": counts.sum() + none + extra["bias"]}


def kinds() -> Built:
    """Integers, bools, 0-d, empty and float64 tensors, keyword and nested arguments, a linear of a 3-D input, setitem."""
    model = _Kinds()
    x, keep = torch.randn(2, 3, 4), torch.tensor([[True, False, True], [True, True, False]])

    def loss() -> Tensor:
        found = model(x, keep=keep, extra={"bias": torch.tensor(0.25), "why": "test", "list": [1, 2.5, None]})
        return found["y"].pow(2).mean() + found["rest"].float() + found["flags"].sum()

    return _trained(model, loss)


class _Conv1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose1d(4, 2, 2, stride=2)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.act(self.norm(self.conv(x))))


def conv1d() -> Built:
    """Convolutions forward and transposed, group norm, a loss written in operators, a gradient clipped."""
    model = _Conv1d()
    x, y = torch.randn(2, 2, 6), torch.randn(2, 2, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean() / 2 + F.smooth_l1_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()

    return model.train(), step


MODELS: dict[str, Callable[[], Built]] = {
    each.__name__: each
    for each in (llama, gpt2, bert, t5, vit, mixtral, resnet, lstm, attention, mlp_bf16, kinds, conv1d)
}
NEEDS_TRANSFORMERS = frozenset({"llama", "gpt2", "bert", "t5", "vit", "mixtral"})


def gradients(model: nn.Module) -> dict[str, str]:
    """CRC-32 of every parameter's gradient."""
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    flat = {name: torch.empty(grad.numel(), dtype=grad.dtype).copy_(grad.reshape(-1)) for name, grad in found.items()}
    return {name: f"{zlib.crc32(data.view(torch.uint8).numpy().tobytes()):08x}" for name, data in flat.items()}


def build(name: str) -> Built:
    """The model and its step, the same bits in every process with the same torch and transformers."""
    torch.manual_seed(20240601)
    return MODELS[name]()
