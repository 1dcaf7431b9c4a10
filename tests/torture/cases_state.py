"""More of what real programs do: interpreter state, optimizers, models of other libraries."""

import logging
import os
import signal
import sys
import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from integration.programs_layers import small_net, trained
from integration.runs import Program


def interpreter_state() -> Program:
    """What a program may have set for itself, and must find as it was."""
    model = small_net()

    def step() -> list[Any]:
        before = (
            sys.gettrace(), sys.getprofile(), sys.excepthook, threading.excepthook, sys.getrecursionlimit(),
            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), logging.getLogger().handlers[:],
            logging.getLogger().level, list(warnings.filters), os.getcwd(), sys.getswitchinterval(), os.umask(0o022),
            dict(os.environ), list(sys.path), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        )  # fmt: skip
        os.umask(before[12])
        loss = model(torch.randn(2, 6)).sum()
        loss.backward()
        return [
            sys.gettrace() is before[0], sys.getprofile() is before[1], sys.excepthook is before[2],
            threading.excepthook is before[3], sys.getrecursionlimit() == before[4],
            signal.getsignal(signal.SIGINT) is before[5], signal.getsignal(signal.SIGTERM) is before[6],
            logging.getLogger().handlers == before[7], list(warnings.filters) == before[9], os.getcwd() == before[10],
            dict(os.environ) == before[13], torch.is_grad_enabled(), loss,
        ]  # fmt: skip

    return Program(step, model)


def traced_by_a_debugger() -> Program:
    model = small_net()
    lines = [0]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            lines[0] += 1
        return trace

    def step() -> list[Any]:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            out = model(torch.ones(1, 6))
        finally:
            sys.settrace(before)
        return [out, lines[0]]

    return Program(step, model)


def warnings_as_errors() -> Program:
    model = small_net()

    def step() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = model(torch.randn(2, 6)).sum()
            loss.backward()
            return loss

    return Program(step, model)


def signals_during_a_step() -> Program:
    """A handler of the program runs torch code in the middle of anything."""
    seen: list[Any] = []
    model = small_net()

    def handler(number: int, frame: Any) -> None:
        seen.append(torch.ones(2).mul(2).sum().item())

    def step() -> Any:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            for _ in range(10):
                os.kill(os.getpid(), signal.SIGUSR1)
                out = model(torch.ones(1, 6))
            return [out, len(seen)]
        finally:
            signal.signal(signal.SIGUSR1, before)

    return Program(step, model)


def closures_and_lbfgs() -> Program:
    model = small_net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    data = torch.ones(2, 6)

    def step() -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(data).square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Program(step, model)


def optimizer_in_backward() -> Program:
    model = small_net()
    optimizers = {value: torch.optim.SGD([value], lr=0.1) for value in model.parameters()}

    def update(value: Tensor) -> None:
        optimizers[value].step()
        optimizers[value].zero_grad()

    for value in model.parameters():
        value.register_post_accumulate_grad_hook(update)

    def step() -> Tensor:
        loss = model(torch.randn(2, 6)).sum()
        loss.backward()
        return loss

    return Program(step, model)


def averaged_and_clipped() -> Program:
    model = small_net()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)

    def step() -> list[Any]:
        optimizer.zero_grad()
        loss = model(torch.randn(2, 6)).square().sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        return [loss, norm, schedule.get_last_lr(), average(torch.ones(1, 6))]

    return Program(step, model)


def generators_left_open() -> Program:
    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, data: Tensor) -> Any:
            for _ in range(3):
                data = self.layer(data)
                yield data

    model = Streams()
    kept: list[Any] = []

    def step() -> list[Any]:
        stream = model(torch.ones(1, 2))
        first = next(stream)
        kept.append(stream)
        with torch.no_grad():
            return [first, *(item for item in model(torch.ones(1, 2)))]

    return Program(step, model)


def pool_older_than_the_step() -> Program:
    """A model called from a pool, whose threads are older than the step."""
    from concurrent.futures import ThreadPoolExecutor

    model = small_net()
    pool = ThreadPoolExecutor(1)
    list(pool.map(lambda _: model(torch.ones(1, 6)).sum().item(), range(4)))

    def step() -> list[Any]:
        outs = list(pool.map(lambda number: model(torch.full((1, 6), float(number))), range(6)))
        sum(out.sum() for out in outs).backward()
        return [*outs]

    return Program(step, model)


def channels_and_casts() -> Program:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.PReLU(), nn.PixelShuffle(2)).to(
        memory_format=torch.channels_last
    )
    return trained(model, lambda: model(torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)).square().sum())
