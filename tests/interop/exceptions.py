"""Where our dumps do not contain what the peer's have, each with its reason. docs/interop.md shows this table; a test compares."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path

LEVELS = ("L0", "L1", "mix")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "interop.md"
BEGIN, END = "<!-- exceptions: written by tests/interop/exceptions.py -->", "<!-- end of exceptions -->"


class InOurs(enum.Enum):
    """What ours has all the same, in place of the tensor."""

    SLOT = "a tensor of this dtype and shape, with other numbers"
    CALL = "other gradients of this call"
    SCALAR = "another number: this is no tensor, and shows in the peer's own comparison only"


@dataclass(frozen=True)
class Exempt:
    """Tensors of the peer that ours need not have: a regular expression over `CALL SLOT`, and why."""

    pattern: str
    reason: str
    in_ours: InOurs
    levels: tuple[str, ...] = LEVELS


EXCEPTIONS: tuple[Exempt, ...] = (
    Exempt(
        r"^(Tensor\.(to|float)|Functional\.(dropout|relu))\.\d+\.backward (input|output)\.",
        "A call that returns its input (`x.float()` of a float32, a dropout that is off) or writes into it makes no node of its own, and the "
        "gradients are those of the node of its input. At level mix, behind a module, that is a node that the peer itself has put there; it shows "
        "other gradients there than at L1. Ours are the same at both levels.",
        InOurs.CALL,
        levels=("mix",),
    ),
    Exempt(
        r"^Module\..*\.(MixtralTopKRouter|MixtralModel)\.backward\.\d+ input\.",
        "A tensor that a module returns and something inside of it uses too, or that passes through: the peer, with a node of its own at the "
        "border, has the gradient that comes from outside; ours is the whole gradient of the tensor.",
        InOurs.SLOT,
        levels=("L0", "mix"),
    ),
    Exempt(
        r"^Functional\.dropout\.\d+\.forward input\.1$",
        "Dropout is off on both sides; the peer still shows the p it was called with and ignores, ours the 0 that was used.",
        InOurs.SCALAR,
    ),
)


def exemptions(call: str, slot: str, level: str) -> list[Exempt]:
    """Every exemption that fits."""
    text = f"{call} {slot}"
    return [each for each in EXCEPTIONS if level in each.levels and re.search(each.pattern, text)]


def table() -> str:
    """The exceptions as a table in Markdown."""
    lines = ["| tensors of the peer | levels | ours has | reason |", "|---|---|---|---|"]
    for each in EXCEPTIONS:
        pattern = each.pattern.replace("|", "\\|")
        lines.append(f"| `{pattern}` | {', '.join(each.levels)} | {each.in_ours.value} | {each.reason} |")
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
