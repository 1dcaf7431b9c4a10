"""Threads of our own, on which nothing is observed.

A finalizer of the program's runs on whichever thread collects garbage. If one that calls a model could be recorded on the
thread that writes the dump, that thread would wait for whoever waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_here = threading.local()


class OwnThread(threading.Thread):
    """Does `work(*args)`. The program does not wait for it at its end."""

    def __init__(self, work: Callable[..., Any], *args: Any, name: str) -> None:
        super().__init__(target=work, args=args, name=f"ulpscope-{name}", daemon=True)

    def run(self) -> None:
        _here.is_own = True
        super().run()


def is_own() -> bool:
    """Whether this code runs on such a thread."""
    return getattr(_here, "is_own", False)
