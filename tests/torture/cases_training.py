"""Not in the list: optimizers, schedules, compilers with breaks, generation, threads and the interpreter around them."""

import contextlib
import contextvars
import cProfile
import gc
import logging
import sys
import threading
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from integration.programs_layers import small_net, trained
from integration.runs import Program
from torture.cases_more import _said

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adagrad": {}, "Adadelta": {}, "NAdam": {}, "RAdam": {"foreach": True}, "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {}, "ASGD": {}, "Adamax": {"foreach": False}, "Adam": {"amsgrad": True, "differentiable": False}, "Adafactor": {},
}  # fmt: skip


def every_optimizer() -> Program:
    models = nn.ModuleList(small_net() for _ in OPTIMIZERS)
    optimizers = [
        getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
        for model, (name, options) in zip(models, OPTIMIZERS.items(), strict=True)
    ]

    def step() -> list[Any]:
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    return Program(step, models)


def optimizers_with_hooks() -> Program:
    model = small_net()
    optimizer = torch.optim.Adam(model[:1].parameters(), lr=0.1, fused=True)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("state"))

    def step() -> list[Any]:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        kept = optimizer.state_dict()
        optimizer.load_state_dict(kept)
        return [
            list(seen),
            [group["lr"] for group in optimizer.param_groups],
            optimizer.state[model[0].weight]["exp_avg"],
        ]

    return Program(step, model)


def optimizer_steps_that_raise() -> Program:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def bad() -> Tensor:
        raise ValueError("a closure that fails")

    def step() -> list[Any]:
        optimizer.zero_grad()
        said = [_said(lambda: optimizer.step(bad))]
        model(torch.ones(1, 6)).sum().backward()
        model[0].weight.grad, kept = None, model[0].weight.grad
        said.append(_said(lambda: setattr(model[0].weight, "grad", torch.ones(3))))
        model[0].weight.grad = kept
        optimizer.step()
        return [said, model(torch.ones(1, 6))]

    return Program(step, model)


def scaled_and_scheduled() -> Program:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    chained = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)],
        milestones=[1],
    )
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def step() -> list[Any]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(3, 6)).float().square().mean()
            with torch.autocast("cpu", enabled=False):
                loss = loss + model(torch.randn(3, 6)).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        chained.step()
        plateau.step(float(loss.detach()))
        return [loss, norm, scaler.get_scale(), chained.get_last_lr(), scaler.state_dict()]

    return Program(step, model)


def weights_averaged() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)

    def step() -> list[Any]:
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
        torch.optim.swa_utils.update_bn([torch.randn(4, 4)], average)
        return [average(torch.ones(2, 4)), schedule.get_last_lr(), model.state_dict()]

    return Program(step, model)


def shapes_of_many_layers() -> Program:
    """Layers whose forward is written in Python, in C, or both."""
    model = nn.ModuleDict(
        {
            "gru": nn.GRU(4, 4, 2, bidirectional=True, dropout=0.1), "rnn": nn.RNNCell(4, 4), "conv": nn.ConvTranspose1d(4, 4, 2),
            "bag": nn.EmbeddingBag(5, 4, mode="max"), "bilinear": nn.Bilinear(4, 4, 4), "group": nn.GroupNorm(2, 4),
            "softmax": nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4]), "fold": nn.Unfold(2), "ctc": nn.CTCLoss(),
            "encoder": nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), "pool": nn.AdaptiveMaxPool1d(2, return_indices=True),
        }
    )  # fmt: skip

    def loss() -> Tensor:
        data = torch.randn(3, 2, 4)
        out, hidden = model["gru"](data)
        total = (
            out.square().sum() + hidden.sum() + model["rnn"](data[0]).sum() + model["conv"](data.permute(1, 2, 0)).sum()
        )
        total = total + model["bag"](torch.tensor([[0, 1], [2, 2]])).sum() + model["bilinear"](data, data).sum()
        total = (
            total + model["group"](data.permute(1, 2, 0)).sum() + model["softmax"](data[0], torch.tensor([1, 5])).loss
        )
        total = total + model["fold"](torch.randn(1, 1, 3, 3)).sum() + model["encoder"](data).sum()
        total = total + model["ctc"](torch.randn(5, 1, 3).log_softmax(2), torch.tensor([[1, 2]]), (5,), (2,))
        return total + model["pool"](data)[0].sum()

    return trained(model, loss)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[float] = []

    @torch.compiler.disable
    def aside(self, data: Tensor) -> Tensor:
        return data.sin()

    def forward(self, data: Tensor) -> Tensor:
        data = self.first(data)
        torch._dynamo.graph_break()
        self.seen.append(float(data.detach().sum()))
        data = self.aside(data)
        return self.second(data) if data.sum() > 0 else self.second(data) * 2


def compiled_with_breaks() -> Program:
    torch._dynamo.reset()
    model = Breaks()
    fast = torch.compile(model, backend="eager")
    program = trained(model, lambda: fast(torch.randn(2, 4)).square().sum())
    program.extras = lambda: list(model.seen)
    return program


def compiled_in_other_ways() -> Program:
    torch._dynamo.reset()
    model = small_net()
    inner = small_net()
    inner.compile(backend="aot_eager", dynamic=True)

    @torch.compile(backend="eager", fullgraph=True)
    def strict(data: Tensor) -> Tensor:
        return inner_function(data) + 1

    @torch.compile(backend="eager", fullgraph=True)
    def refused(data: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return data

    @torch.compile(backend="eager")
    def raises(data: Tensor) -> Tensor:
        if data.sum() > 0:
            raise ValueError("inside")
        return data

    def step() -> list[Any]:
        out = model(torch.ones(2, 6)).sum() + inner(torch.ones(3, 6)).sum() + inner(torch.ones(2, 6)).sum()
        out.backward()
        with ThreadPoolExecutor(2) as pool:
            threaded = list(pool.map(strict, [torch.ones(2), torch.ones(2) * 2]))
        return [
            out,
            threaded,
            _said(lambda: refused(torch.ones(1))).split(":")[0],
            _said(lambda: raises(torch.ones(1))),
            strict(torch.ones(3)),
        ]

    return Program(step, nn.ModuleList([model, inner]))


def inner_function(data: Tensor) -> Tensor:
    return torch.where(data > 0, data.exp(), data)


def compiled_optimizer() -> Program:
    torch._dynamo.reset()
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)

    @torch.compile(backend="eager")
    def update() -> None:
        optimizer.step()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).sum()
        loss.backward()
        update()
        return loss

    return Program(step, model)


def language_model_sampled() -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()
    pieces: list[Any] = []

    class Streams:
        def put(self, value: Tensor) -> None:
            pieces.append(value.tolist())

        def end(self) -> None:
            pieces.append("end")

    class Stops(StoppingCriteria):
        def __call__(self, tokens: Tensor, scores: Any, **_: Any) -> Any:
            return torch.full((tokens.shape[0],), tokens.shape[1] >= 4, dtype=torch.bool)

    def step() -> list[Any]:
        start = torch.tensor([[1, 2]])
        settings: dict[str, Any] = {"max_new_tokens": 3, "pad_token_id": 0, "attention_mask": torch.ones_like(start)}
        sampled = model.generate(start, do_sample=True, top_k=5, temperature=0.7, streamer=Streams(), **settings)
        stopped = model.generate(
            start,
            use_cache=False,
            stopping_criteria=StoppingCriteriaList([Stops()]),
            logits_processor=LogitsProcessorList([lambda tokens, scores: scores * 2]),
            **settings,
        )
        return [sampled, stopped, list(pieces)]

    return Program(step, model)


def loaders_of_data() -> Program:
    model = small_net()
    data = TensorDataset(torch.arange(48.0).reshape(8, 6), torch.arange(8))

    def step() -> list[Any]:
        loader = DataLoader(
            data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1), drop_last=True,
            collate_fn=lambda rows: {"x": torch.stack([row[0] for row in rows]), "y": [int(row[1]) for row in rows]},
        )  # fmt: skip
        return [(model(batch["x"]), batch["y"]) for batch in loader]

    return Program(step, model)


def threads_with_state_of_their_own() -> Program:
    model = small_net()
    local, kind = threading.local(), contextvars.ContextVar("kind", default=1.0)

    def work(number: int) -> Tensor:
        local.factor = number
        kind.set(2.0)
        with torch.no_grad() if number % 2 else contextlib.nullcontext():
            out = model(torch.full((1, 6), float(number))) * local.factor * kind.get()
        assert torch.is_grad_enabled()
        return out

    def step() -> list[Any]:
        with ThreadPoolExecutor(3) as pool:
            outs = list(pool.map(work, range(6)))
        timer = threading.Timer(0.001, lambda: outs.append(model(torch.ones(1, 6))))
        timer.start()
        timer.join()
        before = threading.stack_size(512 * 1024)
        thread = threading.Thread(target=lambda: outs.append(work(1)), daemon=True)
        thread.start()
        thread.join()
        threading.stack_size(before)
        return [outs, [out.requires_grad for out in outs], kind.get()]

    return Program(step, model)


def watched_by_profilers() -> Program:
    model = small_net()

    def step() -> list[Any]:
        profile = cProfile.Profile()
        with profile:
            out = model(torch.ones(1, 6))
        tracemalloc.start()
        try:
            out = out + model(torch.ones(1, 6))
        finally:
            tracemalloc.stop()
        kinds = [0]
        sys.setprofile(lambda frame, event, argument: kinds.__setitem__(0, 1))
        try:
            out.sum().backward()
        finally:
            sys.setprofile(None)
        with torch.autograd.profiler.profile() as seen, torch.autograd.profiler.record_function("mine"):
            model(torch.ones(1, 6))
        return [out, kinds, "mine" in {event.key for event in seen.key_averages()}]

    return Program(step, model)


def warnings_of_the_program() -> Program:
    """Shown as often as without us, and as errors where the program says so."""
    model = small_net()

    def step() -> list[Any]:
        model[1].register_forward_hook(lambda *_: warnings.warn("mine", UserWarning, stacklevel=1))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            out = model(torch.ones(1, 6))
            torch.tensor(torch.ones(1))
            F.mse_loss(torch.ones(2, 1), torch.ones(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            said = _said(lambda: F.mse_loss(torch.ones(2, 1), torch.ones(2)))[:60]
        return [out, [(item.category.__name__, str(item.message)[:60]) for item in seen], said]

    return Program(step, model)


def logging_of_the_program() -> Program:
    """A handler on the root logger that computes, and one that raises."""
    model = small_net()
    told: list[str] = []

    class Computes(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            told.append(f"{entry.name} {torch.ones(2).sum().item()}")

    def step() -> list[Any]:
        handler = Computes(logging.INFO)
        root = logging.getLogger()
        level = root.level
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        try:
            out = model(torch.ones(1, 6))
            logging.getLogger("mine").info("%s", out.sum())
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
        return [out, [line for line in told if line.startswith("mine")]]

    return Program(step, model)


def collector_by_hand() -> Program:
    model = small_net()

    def step() -> list[Any]:
        threshold = gc.get_threshold()
        gc.set_threshold(5, 2, 2)
        seen = [0]
        gc.callbacks.append(watch := lambda phase, facts: seen.__setitem__(0, 1))
        try:
            out = model(torch.ones(1, 6))
            out.sum().backward()
            gc.freeze()
            gc.unfreeze()
        finally:
            gc.callbacks.remove(watch)
            gc.set_threshold(*threshold)
        return [out, seen, gc.get_threshold() == threshold]

    return Program(step, model)
