"""Judging a program that was not edited: begins when it has torch, ends when it ends."""

from __future__ import annotations

import logging
from typing import Any

from ulpscope.frameworks.building import is_building

LEDGER_VARIABLE = "ULPSCOPE_LEDGER"


def begin(options: dict[str, Any]) -> None:
    """Starts a ledger for the rest of the process; steps are found by themselves."""
    from ulpscope.replay.session import Ledger

    if not logging.getLogger("ulpscope").handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ulpscope: %(message)s"))
        logging.getLogger("ulpscope").addHandler(handler)
    Ledger(options["path"]).watch(None if options.get("from_start") else is_building)
