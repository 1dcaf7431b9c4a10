"""Programs made of torch's own layers, optimizers and precision tools. Each function builds one, afresh."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from integration.runs import Program


def trained(model: nn.Module, loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None) -> Program:
    """Zero, forward, backward, update; the loss is the result, the model's state is compared by the helper."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, model)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def mlp() -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    return trained(model, lambda: F.cross_entropy(model(torch.randn(5, 6)), torch.randint(3, (5,))))


def mlp_with_nan_and_zero() -> Program:
    model = small_net()

    def step() -> dict[str, Tensor]:
        data = torch.randn(5, 6)
        data[0, 0], data[1, 1], data[2, 2] = float("nan"), float("inf"), -0.0
        out = model(data)
        out.square().sum().backward()
        return {"out": out, "data": data}

    return Program(step, model)


def cnn_with_inplace_relu_and_batch_norm() -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    return trained(model, lambda: model(torch.randn(4, 3, 8, 8)).square().mean())


def cnn_channels_last() -> Program:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(inplace=True)).to(
        memory_format=torch.channels_last
    )
    return trained(model, lambda: model(torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)).pow(2).sum())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(5, 6, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.head = nn.Linear(12, 2)

    def forward(self, batch: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(batch, lengths, batch_first=True)
        out, state = self.rnn(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(padded).sum() + last.square().sum()


def lstm() -> Program:
    model = Recurrent(nn.LSTM)
    return trained(model, lambda: model(torch.randn(3, 4, 5), torch.tensor([4, 3, 1])))


def gru_cell_loop() -> Program:
    cell = nn.GRUCell(4, 4)

    def loss() -> Tensor:
        state = torch.zeros(2, 4)
        for _ in range(3):
            state = cell(torch.randn(2, 4), state)
        return state.square().sum()

    return trained(cell, loss)


def attention_in_training() -> Program:
    model = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def loss() -> Tensor:
        data = torch.randn(2, 5, 8)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        out, weights = model(data, data, data, key_padding_mask=padding)
        return out.square().mean() + weights.square().mean()

    return trained(model, loss)


def attention_in_evaluation() -> Program:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def step() -> tuple[Tensor, Tensor]:
        data = torch.randn(2, 5, 8)
        with torch.no_grad():
            return model(data, data, data, need_weights=True)

    return Program(step, model)


def encoder_in_evaluation() -> Program:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()

    def step() -> Tensor:
        padding = torch.tensor([[False] * 4, [False] * 2 + [True] * 2])
        with torch.no_grad():
            return model(torch.randn(2, 4, 8), src_key_padding_mask=padding)

    return Program(step, model)


def encoder_decoder_in_training() -> Program:
    model = nn.Transformer(8, 2, 1, 1, dim_feedforward=16, batch_first=True)
    return trained(model, lambda: model(torch.randn(2, 4, 8), torch.randn(2, 3, 8)).square().mean())


def scaled_dot_product() -> Program:
    projection = nn.Linear(4, 12)

    def loss() -> Tensor:
        query, key, value = projection(torch.randn(2, 2, 6, 4)).chunk(3, dim=-1)
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        one = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.2)
        two = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        three = F.scaled_dot_product_attention(query, key, value, attn_mask=torch.randn(6, 6), scale=0.3)
        return (one * two * three).sum()

    return trained(projection, loss)


def autocast_bf16() -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Softmax(dim=-1), nn.Linear(8, 3))

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(5, 6))
            return F.mse_loss(out.float(), torch.randn(5, 3)) + (out @ out.t()).float().mean()

    return trained(model, loss, torch.optim.AdamW(model.parameters(), lr=0.01))


def bf16_model() -> Program:
    model = small_net().bfloat16()
    return trained(model, lambda: model(torch.randn(5, 6, dtype=torch.bfloat16)).square().sum())


def grad_scaler() -> Program:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    count = iter(range(9))

    def step() -> list[object]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(5, 6)).square().mean()
        scaler.scale(loss * (float("inf") if next(count) == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return [loss, norm, scaler.get_scale()]

    return Program(step, model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(tokens)))


def weight_tying() -> Program:
    model = Tied()
    return trained(model, lambda: F.cross_entropy(model(torch.randint(11, (4,))), torch.randint(11, (4,))))


class Branches(nn.Module):
    """One activation feeds two branches and is changed in place in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, data: Tensor) -> Tensor:
        shared = self.stem(data).tanh()
        return self.left(shared) * self.right(shared) + shared


def two_branches() -> Program:
    model = Branches()
    return trained(model, lambda: model(torch.randn(3, 4)).sum())


def same_module_twice() -> Program:
    model = nn.ModuleDict({"shared": nn.Linear(4, 4)})
    return trained(model, lambda: model["shared"](model["shared"](torch.randn(3, 4))).square().sum())


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2 + 3 * at, 3, 1) for at in range(3))

    def forward(self, data: Tensor) -> Tensor:
        features = [data]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, dim=1)), inplace=True))
        return torch.cat(features, dim=1)


def dense_concatenation() -> Program:
    model = Dense()
    return trained(model, lambda: model(torch.randn(2, 2, 4, 4)).square().mean())


def gradient_accumulation() -> Program:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> list[Tensor]:
        optimizer.zero_grad(set_to_none=False)
        losses = [model(torch.randn(3, 6)).square().mean() / 4 for _ in range(4)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        return losses

    return Program(step, model)


def _optimized(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Program:
    model = small_net()
    optimizer = make(list(model.parameters()))
    program = trained(model, lambda: model(torch.randn(5, 6)).square().mean(), optimizer)
    program.extras = lambda: {
        f"{number}.{name}": value
        for number, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }
    return program


def sgd_foreach() -> Program:
    return _optimized(lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9, nesterov=True, foreach=True))


def sgd_fused() -> Program:
    return _optimized(lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9, fused=True))


def adamw_single() -> Program:
    return _optimized(lambda values: torch.optim.AdamW(values, lr=0.1, foreach=False))


def adamw_foreach() -> Program:
    return _optimized(lambda values: torch.optim.AdamW(values, lr=0.1, foreach=True, amsgrad=True))


def adamw_fused() -> Program:
    return _optimized(lambda values: torch.optim.AdamW(values, lr=0.1, fused=True))


def lbfgs() -> Program:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        data = torch.randn(6, 4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(data).square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Program(step, model)


def sparse_embedding() -> Program:
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.LayerNorm(12))
    optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)]

    def step() -> dict[str, Tensor | None]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(torch.randint(20, (2, 3))).pow(3).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return {"loss": loss, "gradient": model[0].weight.grad}

    return Program(step, model)


def embedding_bag_and_parametrization() -> Program:
    model = nn.ModuleList([nn.EmbeddingBag(10, 4, mode="mean"), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))])

    def loss() -> Tensor:
        return model[1](model[0](torch.randint(10, (6,)), torch.tensor([0, 2, 4]))).square().sum()

    return trained(model, loss)
