"""Where the steps of programs are found that nobody marked. Each program writes down what it does; a list for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.step_watch import StepWatch

X = torch.ones(3, 2)


class Told:
    """What was done in each step, and what the steps are said to be."""

    def __init__(self) -> None:
        self.done: list[str] = [""]
        self._closed: list[dict[str, int]] = []
        self.watch = StepWatch(self._next, lambda: None, self._trouble)

    def __call__(self, what: str) -> None:
        self.done[-1] += what

    @property
    def stretches(self) -> list[dict[str, int]]:
        return [*self._closed, self.watch.stretches]

    def _next(self) -> None:
        self._closed.append(self.watch.stretches)
        self.done.append("")

    @staticmethod
    def _trouble(where: str, error: BaseException) -> None:
        raise error


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    told.watch.install()
    yield told
    told.watch.close()


def net() -> nn.Module:
    return nn.Linear(2, 2)


def train(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(X).mean().backward()
    optimizer.step()


def evaluate(model: nn.Module, times: int = 4) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(times):
            model(X)
    model.train()


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad.data, alpha=-0.1)


def plain(told: Told) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, optimizer)
        told("o")


def accumulated(told: Told) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for at in range(6):
        model(X).mean().backward()
        told("b")
        if at % 2:
            optimizer.step()
            told("o")


def adversarial(told: Told, critics: int = 1) -> None:
    judge, maker = net(), net()
    both = SGD(judge.parameters(), lr=0.1), SGD(maker.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(critics):
            (judge(X) - judge(maker(X).detach())).mean().backward()
            both[0].step()
            told("d")
        judge(maker(X)).mean().backward()
        both[1].step()
        told("g")


def delayed(told: Told) -> None:
    critic, actor = net(), net()
    both = SGD(critic.parameters(), lr=0.1), SGD(actor.parameters(), lr=0.1)
    for at in range(6):
        critic(X).mean().backward()
        both[0].step()
        told("q")
        if at % 3 == 2:
            critic(actor(X)).mean().backward()
            both[1].step()
            told("a")


def taught(told: Told) -> None:
    teacher, model = net(), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            teacher(X)
        told("t")
        train(model, optimizer)
        told("o")


def folds(told: Told) -> None:
    for _ in range(2):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            train(model, optimizer)
            told("o")
        evaluate(model)
        told("e")


def closures(told: Told) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X).square().mean()
        loss.backward()
        told("f")
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]


def without_a_model(told: Told) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = SGD([weight], lr=0.1)
    for at in range(3):
        told(str(at))
        weight.square().sum().backward()
        optimizer.step()


def overflowed(told: Told) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = internals.GradScaler("cpu", init_scale=2.0)
    for at in range(4):
        loss = model(X).mean() * (torch.inf if at == 1 else 1.0)
        told(str(at))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def hand_made(told: Told, update: Callable[[nn.Module], None] = by_hand) -> None:
    model = net()
    for at in range(3):
        model.zero_grad()
        model(X).mean().backward()
        update(model)
        told("u")
        if at == 1:
            evaluate(model)
            told("e")


def taught_by_hand(told: Told) -> None:
    teacher, model = net(), net()
    for _ in range(3):
        with torch.no_grad():
            teacher(X)
        told("t")
        model(X).mean().backward()
        by_hand(model)
        told("u")


def attacked(told: Told) -> None:
    model, image = net().eval(), torch.ones(3, 2, requires_grad=True)
    for _ in range(3):
        model(image).mean().backward()
        image.data += 0.1
        told("b")


def summed_by_hand(told: Told) -> None:
    model = net()
    for at in range(6):
        model(X).mean().backward()
        told("b")
        if at % 2:
            by_hand(model)
            model.zero_grad()


def tried_first(told: Told) -> None:
    model = net()
    for _ in range(5):
        model(X)
        told("f")
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, optimizer)
        told("o")


def always_in_eval_mode(told: Told) -> None:
    model = net().eval()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, optimizer)
        told("o")


def rollouts(told: Told) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            with torch.no_grad():
                model(X)
            told("r")
        for _ in range(2):
            train(model, optimizer)
            told("o")


@pytest.mark.parametrize(
    ("program", "steps"),
    [
        (plain, "o o o"),
        (accumulated, "bbo bbo bbo"),
        (adversarial, "dg dg dg"),
        (lambda told: adversarial(told, 3), "d d dg d d dg d d dg"),
        (delayed, "q q qa q q qa"),
        (taught, "to to to"),
        (folds, "o oe o oe"),
        (closures, "fff fff fff"),
        (overflowed, "0 1 2 3"),
        (hand_made, "u ue u"),
        (lambda told: hand_made(told, by_data), "u ue u"),
        (taught_by_hand, "tu tu tu"),
        (attacked, "b b b"),
        (tried_first, "fffffo o"),
        (always_in_eval_mode, "o o"),
        (rollouts, "rrro orrr o o"),
        # Nobody tells where a step begins: the optimizer tells where it ends, and one more is begun behind the last.
        (without_a_model, "0 1 2 "),
        # That gradients are being summed is told when an update was seen to show.
        (summed_by_hand, "b b bb bb"),
    ],
)
def test_a_step_is_a_round_of_the_loop_with_all_its_updates(
    program: Callable[[Told], None], steps: str, told: Told
) -> None:
    program(told)
    assert " ".join(told.done) == steps


def test_an_evaluation_in_between_changes_no_number_and_comes_behind_what_it_evaluates(told: Told) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(4):
        train(model, optimizer)
        if step % 2:
            evaluate(model)
    assert told.stretches == [{"training": 1}, {"training": 1, "evaluation": 4}] * 2


def test_training_and_evaluation_on_one_line_are_told_apart(told: Told) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def epoch(*, trains: bool) -> None:
        with torch.set_grad_enabled(trains):
            for _ in range(2):
                loss = model(X).mean()
                if trains:
                    loss.backward()
                    optimizer.step()

    for _ in range(2):
        epoch(trains=True)
        epoch(trains=False)
    assert told.stretches == [{"training": 1}, {"training": 1, "evaluation": 2}] * 2


def test_what_has_no_parameters_is_no_model_until_it_has_some(told: Told) -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "inner"):
                self.inner = net()
            found: Tensor = self.inner(x)
            return found

    model, scale = Late(), nn.Sequential(nn.ReLU(), nn.Tanh())
    with torch.no_grad():
        for _ in range(50):
            scale(X)
        for _ in range(3):
            model(X)
    assert told.stretches == [{"preparation": 51, "evaluation": 1}, {"evaluation": 1}]


def test_an_inference_has_a_step_for_each_forward_of_the_largest_model_and_longer_ones_after_a_hundred(
    told: Told,
) -> None:
    small, large = net(), nn.Linear(2, 9)
    with torch.no_grad():
        for _ in range(350):
            small(X)
            large(X)
    counts = [each["evaluation"] for each in told.stretches]
    assert len(counts) == 103
    assert sum(counts) == 700
    assert counts[1:100] == [2] * 99


def test_tokens_are_one_generation_whether_a_state_or_the_text_itself_comes_back(told: Told) -> None:
    text, state = nn.Embedding(9, 40), nn.GRU(2, 9)
    with torch.no_grad():
        for _ in range(2):
            ids = torch.zeros(1, 2, dtype=torch.long)
            for _ in range(4):
                text(ids)
                ids = torch.cat([ids, ids[:, :1]], dim=1)
        hidden = None
        for _ in range(3):
            _, hidden = state(X[None], hidden)
    assert told.stretches == [{"generation": 4}, {"generation": 7}]


def test_an_optimizer_that_never_updates_keeps_no_step_open_for_long(told: Told) -> None:
    first, second = net(), net()
    one, other = SGD(first.parameters(), lr=0.1), SGD(second.parameters(), lr=0.1)
    for _ in range(20):
        train(first, one)
    for _ in range(3):
        train(second, other)
    assert len(told.done) == 23


def test_what_is_watched_is_given_back() -> None:
    watched = (nn.Module.__call__, Optimizer.__init__, internals.GradScaler.step)
    before = [function.__code__ for function in watched]  # type: ignore[attr-defined]
    watch = StepWatch(lambda: None, lambda: None, lambda *_: None)
    watch.install()
    net()(X).mean().backward()
    assert all(function.__code__ is not code for function, code in zip(watched, before, strict=True))  # type: ignore[attr-defined]
    watch.close()
    assert [function.__code__ for function in watched] == before  # type: ignore[attr-defined]
