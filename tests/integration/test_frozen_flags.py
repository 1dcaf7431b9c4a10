"""A program may have frozen torch's backend flags: seeding says which stay as they are, and ends nothing."""

import logging
import random

import numpy as np
import pytest
import torch

from ulpscope.frameworks.torch.determinism import seed_all


def test_frozen_flags_are_said_and_end_no_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="not allowed to set"):
        torch.backends.cudnn.benchmark = False
    try:
        seed_all(7, False)
        assert torch.initial_seed() == 7
    finally:
        random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    assert [name for name in ("deterministic", "benchmark", "enabled") if f"cudnn.{name} stays" in caplog.text] == [
        "deterministic",
        "benchmark",
        "enabled",
    ]
