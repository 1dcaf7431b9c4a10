"""Two streams of elements read once, side by side: how do they differ?  And where does a JSON value end?

The functions come from the C extension where it could be built, else from `pairs_fallback`, with the same arguments and
the same results (sums to rounding).  Nothing here knows files: a stream is a buffer of elements in row-major order and
their dtype code.

    contrast(reference, reference_code, target, target_code, state[, checksums]) -> None
    contrast_all(list of such arguments) -> None
    skip_json(buffer, start) -> int
    let_go(*views) -> None
    totals(state) -> Totals

`contrast` adds what it finds to `state`, a bytearray of one `STATE` that begins as zeros, so that streams of any length
can be fed in pieces; with `checksums`, a bytearray of two little-endian uint32 that begins as zeros, it brings the CRC-32 of
both streams forward in the same pass; ValueError if the two are not equally long, or complex (`pairs_fallback` alone takes those).  Where
either element is not finite, the pair counts in `special` and adds nothing to sums and maxima.  Over all others, with r
and t the two elements as float64 and d = |t - r| (of 64-bit integers the true difference, rounded once):

    differing         elements with t != r, and what is not finite on one side or differently on both
    below_thousandth, below_five_thousandths
                      elements with d / |r| < 0.001 and < 0.005, 0 / 0 being 0; not finite on both sides counts too
    place             1 + the position of the first d that equals max_absolute; 0 if nothing differs
    max_absolute      of d
    max_relative      of d / |r|, 0 / 0 being 0 and anything else / 0 infinite
    max_ulp           of d in units in the last place of r, in the float dtype with fewer digits of the two; of d between
                      integers
    sums              in lanes that are still to be added up: r * t, r * r, t * t, d * d, d, d / |r| where that is
                      finite, d in units in the last place

`skip_json` returns the index just behind the JSON value that begins at `start`, by matching brackets outside of strings
and without looking at anything else; ValueError if the buffer ends before the value does.

`let_go` gives the pages back that lie wholly within views of mapped files, which the caller makes sure they are: the bytes come
from the file again when they are read.
"""

from dataclasses import dataclass

from ulpscope.native import pairs_fallback

try:
    from ulpscope.native._pairs import contrast, contrast_all, let_go, skip_json
    from ulpscope.native._pairs import totals as added_up

    HAVE_EXTENSION = True
except ImportError:
    from ulpscope.native.pairs_fallback import contrast, contrast_all, let_go, skip_json
    from ulpscope.native.pairs_fallback import totals as added_up

    HAVE_EXTENSION = False

__all__ = ["HAVE_EXTENSION", "STATE", "Totals", "contrast", "contrast_all", "let_go", "skip_json", "totals"]

STATE = pairs_fallback.STATE


@dataclass(frozen=True, slots=True)
class Totals:
    """A state with its lanes added up, field by field."""

    count: int
    differing: int
    below_thousandth: int
    below_five_thousandths: int
    nan_reference: int
    nan_target: int
    nan_both: int
    inf_reference: int
    inf_target: int
    inf_same: int
    inf_opposite: int
    either: int
    place: int
    max_absolute: float
    max_relative: float
    max_ulp: float
    dot: float
    reference: float
    target: float
    difference: float
    absolute: float
    relative: float
    ulp: float


def totals(state: bytearray) -> Totals:
    """What a state says."""
    return Totals(*added_up(state))
