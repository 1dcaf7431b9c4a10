"""Runs first in every Python process below `ulpscope capture`. Steps aside for the user's own sitecustomize."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _here]
try:
    from ulpscope.capture.watch import OPTIONS_VARIABLE, begin_capture, watch
    from ulpscope.replay.drift_watch import DRIFT_VARIABLE, begin_drift
    from ulpscope.replay.noise_watch import NOISE_VARIABLE, begin_noise
    from ulpscope.replay.watch import LEDGER_VARIABLE, begin
except ImportError as error:
    sys.stderr.write(f"ulpscope: not recording, this Python cannot import ulpscope ({error}): {sys.executable}\n")
else:
    watch(
        {
            OPTIONS_VARIABLE: begin_capture,
            LEDGER_VARIABLE: begin,
            NOISE_VARIABLE: begin_noise,
            DRIFT_VARIABLE: begin_drift,
        }
    )

# Last: the user's own may import torch, and may fail.
_me = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  (the user's, now that ours is out of the way)
except ImportError as error:
    if error.name != "sitecustomize":
        raise
finally:
    sys.modules.setdefault("sitecustomize", _me)  # the interpreter looks for what it imported
