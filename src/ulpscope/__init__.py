"""ulpscope: where two runs of a model stop agreeing, and whether that is a bug or rounding.

Importing this imports neither torch nor anything heavy; each name below brings what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulpscope import api, capture, compare
    from ulpscope.capture.session import Capture
    from ulpscope.frameworks.torch.determinism import seed_all
    from ulpscope.frameworks.torch.replay_reference import reference
    from ulpscope.model.errors import CaptureError, ConfigError, DumpError, UlpscopeError
    from ulpscope.model.names import call_text, slot_text
    from ulpscope.replay.session import Ledger, ledger
    from ulpscope.store.dump import Dump
    from ulpscope.store.registry import open_dump, open_run

__version__ = "0.1.0"
_HOMES = {
    "Capture": "capture.session",
    "seed_all": "frameworks.torch.determinism",
    "reference": "frameworks.torch.replay_reference",
    "Ledger": "replay.session",
    "ledger": "replay.session",
    "Dump": "store.dump",
    "call_text": "model.names",
    "slot_text": "model.names",
    "open_dump": "store.registry",
    "open_run": "store.registry",
    "UlpscopeError": "model.errors",
    "ConfigError": "model.errors",
    "CaptureError": "model.errors",
    "DumpError": "model.errors",
}
__all__ = [
    "Capture",
    "CaptureError",
    "ConfigError",
    "Dump",
    "DumpError",
    "Ledger",
    "UlpscopeError",
    "__version__",
    "api",
    "call_text",
    "capture",
    "compare",
    "ledger",
    "open_dump",
    "open_run",
    "reference",
    "seed_all",
    "slot_text",
]


def __getattr__(name: str) -> Any:
    if name in ("api", "capture", "compare"):
        return importlib.import_module(f"ulpscope.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ulpscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ulpscope.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
