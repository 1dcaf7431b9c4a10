"""The taps of a run whose calls are run twice: names from the usual taps, the second runs around the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from ulpscope.frameworks.base import Observer
from ulpscope.frameworks.torch.perturb_run import Perturber
from ulpscope.frameworks.torch.probe import TorchProbe
from ulpscope.frameworks.torch.replay_probe import Unmeasured
from ulpscope.model.records import Level


def perturb_probe(observer: Observer, perturber: Perturber, models: Sequence[Module], *, backward: bool) -> TorchProbe:
    """Taps that are on between `install` and `remove`."""
    unmeasured: Any = Unmeasured()
    runner: Any = perturber
    return TorchProbe(observer, unmeasured, level=Level.OP, models=models, vendor=runner, as_msprobe=not backward)
