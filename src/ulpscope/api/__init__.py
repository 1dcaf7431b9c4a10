"""What each verb of `ulpscope` does, as a function that takes paths and commands and returns data. It prints nothing.

Each name brings what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulpscope.api.blaming import Blamed, blame
    from ulpscope.api.checks import (
        NoiseCheck,
        OverflowCheck,
        check_noise,
        check_ops,
        check_overflow,
        check_ranks,
    )
    from ulpscope.api.comparing import compare
    from ulpscope.api.converting import Converted, convert
    from ulpscope.api.corresponding import correspondence
    from ulpscope.api.drift import Chaos, chaos
    from ulpscope.api.recording import record
    from ulpscope.api.rerunning import repro, rerun
    from ulpscope.replay.results import OpsCheck

_HOMES = {
    **dict.fromkeys(("Blamed", "blame"), "blaming"),
    "compare": "comparing",
    **dict.fromkeys(("NoiseCheck", "OpsCheck", "OverflowCheck"), "checks"),
    **dict.fromkeys(("check_noise", "check_ops", "check_overflow", "check_ranks"), "checks"),
    **dict.fromkeys(("Converted", "convert"), "converting"),
    "correspondence": "corresponding",
    **dict.fromkeys(("Chaos", "chaos"), "drift"),
    "record": "recording",
    **dict.fromkeys(("repro", "rerun"), "rerunning"),
}
__all__ = [
    "Blamed",
    "Chaos",
    "Converted",
    "NoiseCheck",
    "OpsCheck",
    "OverflowCheck",
    "blame",
    "chaos",
    "check_noise",
    "check_ops",
    "check_overflow",
    "check_ranks",
    "compare",
    "convert",
    "correspondence",
    "record",
    "repro",
    "rerun",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ulpscope.api' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ulpscope.api.{home}"), name)


def __dir__() -> list[str]:
    return __all__
