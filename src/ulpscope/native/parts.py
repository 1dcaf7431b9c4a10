"""The C parts that are missing here, said once a process by whoever would have used them, with what it costs."""

import functools
import logging

from ulpscope.native import measuring, pairs, taps

__all__ = ["say_missing"]

log = logging.getLogger(__name__)


@functools.cache
def say_missing(work: str) -> None:
    """Warns if `recording` or `comparing` is done in Python; the figures are those of benchmarks/README.md."""
    recording = (
        (taps.HAVE_EXTENSION, "_taps", "a record of a small call takes up to 9 times as long"),
        (measuring.HAVE_EXTENSION, "_measure", "measuring tensors takes 5 times as long"),
    )
    comparing = ((pairs.HAVE_EXTENSION, "_pairs", "comparing elements takes 10 times as long"),)
    missing = [(name, cost) for built, name, cost in (recording if work == "recording" else comparing) if not built]
    if missing:
        names = ", ".join(f"ulpscope.native.{name}" for name, _ in missing)
        costs = "; ".join(cost for _, cost in missing)
        log.warning(
            "not compiled here: %s. Results agree to rounding, but %s. A wheel, or `pip install` again, brings them.",
            names,
            costs,
        )
