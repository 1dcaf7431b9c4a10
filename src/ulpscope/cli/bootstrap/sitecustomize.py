"""Runs first in every Python process below `ulpscope capture`. Steps aside for the user's own sitecustomize."""

import contextlib
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _here]
_me = sys.modules.pop("sitecustomize")
with contextlib.suppress(ImportError):
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  (the user's, now that ours is out of the way)
sys.modules.setdefault("sitecustomize", _me)  # the interpreter looks for what it imported

try:
    from ulpscope.capture.watch import watch
    from ulpscope.replay.drift_watch import DRIFT_VARIABLE, begin_drift
    from ulpscope.replay.noise_watch import NOISE_VARIABLE, begin_noise
    from ulpscope.replay.watch import LEDGER_VARIABLE, begin
except ImportError as error:
    sys.stderr.write(f"ulpscope: not recording, this Python cannot import ulpscope ({error}): {sys.executable}\n")
else:
    watch()
    watch(LEDGER_VARIABLE, begin)
    watch(NOISE_VARIABLE, begin_noise)
    watch(DRIFT_VARIABLE, begin_drift)
