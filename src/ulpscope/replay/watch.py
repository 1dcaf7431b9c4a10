"""Judging a program that was not edited: begins with its first forward, ends when it ends. Imports torch only then."""

from __future__ import annotations

import logging
from typing import Any

LEDGER_VARIABLE = "ULPSCOPE_LEDGER"


def begin(options: dict[str, Any]) -> None:
    """Starts a ledger for the rest of the process; steps are found by themselves."""
    from ulpscope.replay.session import Ledger

    if not logging.getLogger("ulpscope").handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ulpscope: %(message)s"))
        logging.getLogger("ulpscope").addHandler(handler)
    ledger = Ledger(options["path"])
    if options.get("from_start"):
        ledger.start()
    else:
        ledger.wait_for_forward()
