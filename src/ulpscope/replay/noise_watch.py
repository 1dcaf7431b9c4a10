"""Running the calls of a program twice that was not edited. Imports torch only when the program has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

NOISE_VARIABLE = "ULPSCOPE_NOISE"


def begin_noise(options: dict[str, Any]) -> None:
    """Starts with the first forward; steps are found by themselves."""
    from ulpscope.replay.noise import Noise, NoiseConfig
    from ulpscope.store.noise import own_file, own_line

    if not logging.getLogger("ulpscope").handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ulpscope: %(message)s"))
        logging.getLogger("ulpscope").addHandler(handler)
    file = own_file(Path(options["path"]))
    steps = int(options["steps"])
    config = NoiseConfig(
        mode=options["mode"],
        parts=tuple(options["only"]),
        backward=options["backward"],
        steps=lambda step: step < steps,
    )
    Noise(config, lambda row: file.add(own_line(row)), first=lambda: file.add("")).wait_for_forward()
