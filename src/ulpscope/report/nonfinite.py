"""Where the first nan or infinity of a recorded run begins, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ulpscope.analyze.first_nonfinite import Bad, Beginning, First
from ulpscope.model.names import call_text
from ulpscope.report.overflow import call_json, call_lines

_WORDS = {Bad.INF: "infinity", Bad.NAN: "nan"}
_HEADS = {
    Beginning.MADE: "makes the first {}",
    Beginning.CAME: "got the first {} from another rank",
    Beginning.THERE: "is the first that was given a {}",
    Beginning.UNCLEAR: "is the first that returned a {}",
}
_MEANING = {
    Beginning.MADE: "all it was given is finite, and what it returned is not",
    Beginning.CAME: "this rank gave finite values; who sent it cannot be told: {}",
    Beginning.THERE: "no recorded call made it: it came with the data, the weights, or a call that is not recorded",
    Beginning.UNCLEAR: "cannot tell whether it made it: {}",
}


def nonfinite_lines(first: First, *, ranks: int) -> list[str]:
    """One origin in a few lines."""
    word = _WORDS[first.bad]
    place = f"step {first.step}" + (f", rank {first.rank}" if ranks > 1 else "")
    meaning = _MEANING[first.how].format(first.why)
    if first.how is Beginning.MADE and first.given is Bad.INF:
        meaning = "it was given infinities, and no nan"
    if first.how is Beginning.THERE and first.why:
        meaning += f"; {first.why}"
    lines = [
        f"{call_text(first.call.id)}  {_HEADS[first.how].format(word)}  ({place})",
        *call_lines(first.call, first.source),
        f"  {meaning}",
    ]
    lines += [f"  rank {rank} got it by {call_text(call)}" for rank, call in first.reached]
    return lines


def nonfinite_json(first: First) -> dict[str, Any]:
    """One origin as plain JSON."""
    plain = call_json(first.call, first.source, step=first.step, rank=first.rank)
    reached = [{"rank": rank, "call": call_text(call)} for rank, call in first.reached]
    return {**plain, "nature": first.how.value, "reason": first.why, "kind": _WORDS[first.bad], "reached": reached}


def answer_line(found: Sequence[First]) -> str:
    """The answer in one line."""
    if not found:
        return "no nan, and no infinity that a call made of finite values, in what is recorded"
    made = [first for first in found if first.how is Beginning.MADE]
    if not made:
        return "who made it cannot be told from this recording"
    shown = ", ".join(f"{call_text(first.call.id)} on rank {first.rank}" for first in made[:4])
    return f"it begins at {shown}" + (f" and {len(made) - 4} more" if len(made) > 4 else "")
