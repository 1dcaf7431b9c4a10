"""The C part of a capture: what runs for every call. `C` is None where it could not be built; Python does the same then.

ULPSCOPE_NATIVE says how far it goes: `full` asks torch's own library of tensors and the graph, `safe` asks everything of that through
Python, `off` leaves the C part out. Without it a torch that we know gets `full`, any other `safe`.
"""

import os

MODES = ("full", "safe", "off")
ASKED = os.environ.get("ULPSCOPE_NATIVE", "")

try:
    from ulpscope.native import _taps as C

    HAVE_EXTENSION = True
except ImportError:
    C = None  # type: ignore[assignment]
    HAVE_EXTENSION = False
if ASKED == "off":
    C = None  # type: ignore[assignment]

__all__ = ["ASKED", "HAVE_EXTENSION", "MODES", "C"]
