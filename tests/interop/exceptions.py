"""Where our dumps do not contain what the peer's have, each with its reason. docs/interop.md shows this table; a test compares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "interop.md"
BEGIN, END = "<!-- exceptions: written by tests/interop/exceptions.py -->", "<!-- end of exceptions -->"


@dataclass(frozen=True)
class Exempt:
    """Tensors of the peer that ours need not have: a regular expression over `CALL SLOT`, and why.

    With `any_slot` the tensor must still be there, in another slot of the same call. `scalar`: what is meant is no tensor, and
    shows only in the peer's own comparison."""

    pattern: str
    reason: str
    any_slot: bool = False
    scalar: bool = False


EXCEPTIONS: tuple[Exempt, ...] = (
    Exempt(
        r"^(?!Module\.).*\.backward output\.",
        "The peer lists the gradients in the order of the autograd node (of `linear`: bias, input, transposed weight); ours have the "
        "position of the argument they belong to.",
        any_slot=True,
    ),
    Exempt(
        r"^Functional\.(linear|cross_entropy|multi_head_attention_forward|scaled_dot_product_attention)\.\d+\.backward output\.0$",
        "These calls are several autograd nodes and the peer watches the last one: its `output` is a gradient inside the call (of a `linear` "
        "with 3-D input: that of a reshaped intermediate). Ours is the gradient of the call's arguments.",
    ),
    Exempt(
        r"^(Tensor\.(to|float)|Functional\.dropout)\.\d+\.backward (input|output)\.",
        "A call that returns its input (`x.float()` of a float32, a dropout that is off) makes no autograd node; the peer watches the node of the call "
        "before it and shows that call's gradients. Ours shows the gradient that passes through.",
    ),
    Exempt(
        r"^Functional\.relu\.\d+\.backward output\.0$",
        "At level mix, of an in-place `relu` the peer watches the node that its own module hook put there: its `output` is its `input`, unlike its own "
        "dump at L1. Ours are the same at both levels.",
    ),
    Exempt(
        r"^Module\..*\.backward\.\d+ (input|output)\.",
        "The peer numbers the gradients of a module one after the other: those of its outputs without their nesting, those of its arguments "
        "without the arguments that need none. Ours have the place of the output or argument they belong to.",
        any_slot=True,
    ),
    Exempt(
        r"^Functional\.dropout\.\d+\.forward input\.1$",
        "Dropout is off on both sides; the peer still shows the p it was called with and ignores, ours the 0 that was used.",
        scalar=True,
    ),
    Exempt(
        r"^Tensor\.__setitem__\.\d+\.forward output\.0$",
        "The call returns nothing. The peer has an empty place there.",
        scalar=True,
    ),
)


def exemptions(call: str, slot: str) -> list[Exempt]:
    """Every exemption that fits."""
    text = f"{call} {slot}"
    return [each for each in EXCEPTIONS if re.search(each.pattern, text)]


def table() -> str:
    """The exceptions as a table in Markdown."""
    lines = ["| tensors of the peer | are in ours | reason |", "|---|---|---|"]
    for each in EXCEPTIONS:
        where = "in another slot" if each.any_slot else "no"
        lines.append(f"| `{each.pattern.replace('|', chr(92) + '|')}` | {where} | {each.reason} |")
    return "\n".join(lines)


def document(text: str) -> str:
    """A document with the table between its two marks brought up to date."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the marks {BEGIN} and {END} are not in the document")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    DOCS.write_text(document(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
