"""Where a cell of our table is not that of msprobe 8.2.1, each with its reason. docs/compare-legacy.md shows this table.

A cell is first read as a number (to 1e-6, percentages too) or as a text without white space in which nothing is repeated; what
still differs must be one of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Row = Mapping[str, object]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "compare-legacy.md"
BEGIN, END = "<!-- exceptions: written by tests/interop/table_exceptions.py -->", "<!-- end of exceptions -->"

_STATISTICS = ("NPU max", "NPU min", "NPU mean", "NPU l2norm", "Bench max", "Bench min", "Bench mean", "Bench l2norm")
_METRICS = (
    *("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio"),
    "Accuracy Reached or Not",
)
# Reasons of marks whose rules differ: red 1, red 4, yellow 3; and what stands or falls with them.
_RULES_DIFFER = (
    "maximum or minimum is nan",
    "maximum relative error exceeds 0.5",
    "maximum relative error exceeds 0.1",
    "Need double check api accuracy",
)


@dataclass(frozen=True)
class Exempt:
    """Cells that may differ: `fits(column, our row, the peer's row)`, and why."""

    name: str
    reason: str
    fits: Callable[[str, Row, Row], bool]


def _percent(cell: object) -> float | None:
    match = re.fullmatch(r"([\d.e+-]+|inf)%", str(cell))
    return float(match[1]) / 100 if match else None


def _warns(row: Row) -> bool:
    """The seed's rule, from the cells: one of four relative errors above a half."""
    for name in ("Max", "Min", "Mean", "Norm"):
        error = _percent(row[f"{name}RelativeErr"])
        difference = row["L2norm diff" if name == "Norm" else f"{name} diff"]
        over_zero = row[f"Bench {'l2norm' if name == 'Norm' else name.lower()}"] == 0 and difference not in (
            0,
            "N/A",
            "Nan",
        )
        infinite = "inf" in str(difference)
        if over_zero or infinite or (error is not None and error > 0.5):
            return True
    return False


def _warning(column: str, ours: Row, peer: Row) -> bool:
    return column == "Result" and "Max diff" in ours and (ours["Result"] == "Warning") == _warns(ours)


def _one_sided(row: Row) -> bool:
    sides = [
        (str(row[f"NPU {name}"]), str(row[f"Bench {name}"]))
        for name in ("max", "min", "mean", "l2norm")
        if "NPU max" in row
    ]
    odd = ("Nan", "inf", "-inf")
    return any((ours in odd) is not (theirs in odd) for ours, theirs in sides if "N/A" not in (ours, theirs))


# The tool says these again and again in one cell.
_REPEATED = (
    "This is type of 0-d tensor, can not calculate 'Cosine', 'EucDist', 'One Thousandth Err Ratio' and 'Five Thousandths Err Ratio'.",
    "Cannot compare by MaxAbsError, the data contains nan/inf/-inf in dump data.",
    "Cannot compare by MaxRelativeError, the data contains nan/inf/-inf in dump data.",
)


def plain(cell: object) -> list[str]:
    """The lines of a text without white space, and without what is said again."""
    lines = []
    for line in str("" if cell is None else cell).split("\n"):
        line = _squeezed(line)
        for message in map(_squeezed, reversed(_REPEATED)):
            if message in line:
                line = message + line.replace(message, "")
        lines.append(line)
    return list(dict.fromkeys(filter(None, lines)))


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def _marks(column: str, ours: Row, peer: Row) -> bool:
    """Colours and reasons, where the difference is in the rules named above."""
    if column not in ("fill", "Err_message"):
        return False
    left, right = ({line.lower() for line in plain(row["Err_message"])} for row in (ours, peer))
    # A message of the peer may stand in the same line as the warning.
    warning = _squeezed("Need double check api accuracy.").lower()
    left, right = ({line.replace(warning, "") for line in side} - {""} for side in (left, right))
    known = [_squeezed(text).lower() for text in _RULES_DIFFER]
    return all(any(text in line for text in known) or _only_yellow(line, right, left) for line in left ^ right)


def _only_yellow(line: str, right: set[str], left: set[str]) -> bool:
    """Reasons for yellow fall away, or come back, with a red that is there on one side only."""
    reds = [_squeezed(text).lower() for text in _RULES_DIFFER[:2]]
    one_sided = any(any(text in each for text in reds) for each in left ^ right)
    return one_sided and "requires_grad" not in line


def _is_truth(column: str, ours: Row, peer: Row) -> bool:
    return column in ("fill", "Err_message") and ours["NPU Dtype"] == "torch.bool"


def _without(text: str) -> Callable[[str, Row, Row], bool]:
    return lambda column, ours, peer: text in str(ours.get("Err_message") or "")


EXCEPTIONS: tuple[Exempt, ...] = (
    Exempt(
        "Pass",
        "`Pass`, as the manual writes it; the tool writes `pass`.",
        lambda column, ours, peer: column == "Result" and (ours[column], peer[column]) == ("Pass", "pass"),
    ),
    Exempt(
        "no checksum",
        "A tensor without a checksum is not known to be equal: `N/A`. The tool shows the CRC-32 of nothing, 00000000, and passes it.",
        lambda column, ours, peer: (
            column in ("NPU MD5", "BENCH MD5", "Result") and "00000000" in (peer.get("NPU MD5"), peer.get("BENCH MD5"))
        ),
    ),
    Exempt(
        "norm of a 0-d tensor",
        "The L2 norm of a 0-d tensor is its absolute value; the dumps of the tool have the element itself there, with its sign.",
        lambda column, ours, peer: (
            column in ("NPU l2norm", "Bench l2norm", "L2norm diff", "NormRelativeErr")
            and ours["NPU Tensor Shape"] == "[]"
            and str(ours["NPU Dtype"]).startswith("torch.")
        ),
    ),
    Exempt(
        "Warning",
        "A relative error is relative to the bench, as the manual says; the tool divides by the larger of the two numbers (of two negative "
        "ones, the smaller). So its warning comes at other errors than the 0.5 of its own columns.",
        _warning,
    ),
    Exempt(
        "nan on one side",
        "A number that is nan on one side alone is a `Warning`, and real data without dimensions of which one side alone is finite is `No`, "
        "as other real data is. The manual's relative error says neither that it is above a half nor that it is below; the tool has no verdict.",
        lambda column, ours, peer: (
            column in ("Result", "Err_message", "MaxAbsErr", "MaxRelativeErr", _METRICS[-1]) and _one_sided(ours)
        ),
    ),
    Exempt(
        "marks",
        "Red 1 is for nan too (the tool looks for `nan`, its cell holds `Nan`); red 4 divides by 0.01 at least; yellow 3 is for real data "
        "too. All three as the manual says. Where a row is red on one side only, its yellow reasons are on the other.",
        _marks,
    ),
    Exempt(
        "marks of truth values",
        "The ratio of a tensor of truth values counts for yellow 2, as the manual makes no exception; the tool leaves them out.",
        _is_truth,
    ),
    Exempt(
        "spelling",
        "Two messages as the manual writes them: `The Position of inf or nan ...` and `... bench Tensor do not match`; the tool writes "
        "`position` and `tensor`.",
        lambda column, ours, peer: (
            column == "Err_message" and _squeezed(str(ours[column])).lower() == _squeezed(str(peer[column])).lower()
        ),
    ),
    Exempt(
        "dtypes",
        "A match needs the same name and shape, as the manual says, and message 12 tells of another dtype. The tool matches "
        "float32, float16 and bfloat16 only; float64 against float32 is `unmatched` there.",
        lambda column, ours, peer: peer["Bench Name"] == "N/A" and ours["NPU Dtype"] != ours["Bench Dtype"] != "N/A",
    ),
    Exempt(
        "shapes",
        "Real data of another shape is `shape unmatched` and `Unmatched`, as the manual says; the tool never gets there: it shows such "
        "a row as one without a bench.",
        _without("Shape of NPU and bench Tensor do not match."),
    ),
    Exempt(
        "inf of both signs",
        "+inf where the bench has -inf is a position that does not match; for the tool they are equal, and it says Yes.",
        lambda column, ours, peer: (
            column in (*_METRICS, "Err_message")
            and "Position" in str(ours["Err_message"])
            and "osition" not in str(peer["Err_message"])
        ),
    ),
    Exempt(
        "MaxRelativeErr over 0",
        "inf where the bench has a 0 and the NPU has not, as the formula says; the tool adds an epsilon and shows numbers like 2.25e+16.",
        lambda column, ours, peer: column == "MaxRelativeErr" and ours[column] in ("inf", float("inf")),
    ),
    Exempt(
        "half precision",
        "Relative errors are computed in float64; the tool computes them in the dtype of the file, which has three digits for float16.",
        lambda column, ours, peer: (
            column in ("MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio")
            and "16" in str(ours["NPU Dtype"])
        ),
    ),
    Exempt(
        "integers beyond 2**53",
        "Integers are subtracted as integers; the tool makes float64 of them first, and 2**53 + 1 equals 2**53.",
        lambda column, ours, peer: (
            column in _METRICS and ours["NPU Dtype"] == "torch.int64" and float(str(ours["NPU max"])) >= 2**53
        ),
    ),
    Exempt(
        "complex numbers",
        "Complex tensors are compared as complex ones; the tool drops the imaginary part.",
        lambda column, ours, peer: column in _METRICS and "complex" in str(ours["NPU Dtype"]),
    ),
    Exempt(
        "a cosine of zeros",
        "A cosine that is `Nan` is no good one: `No` where MaxAbsErr is above 0.001. For the tool it is never below 0.99, and `Yes` up "
        "to an error of 1.",
        lambda column, ours, peer: column == "Accuracy Reached or Not" and ours["Cosine"] == "Nan",
    ),
    Exempt(
        "nan%",
        "A relative error that is not a number is `Nan`, also where the bench is infinite; the tool has `nan%` there.",
        lambda column, ours, peer: peer[column] == "nan%" and ours[column] == "Nan",
    ),
    Exempt(
        "NoneType",
        'An argument that is None is a row of `None`, as where the dump has null; the tool shows the rare {"type": "NoneType"} as a class.',
        lambda column, ours, peer: ours["NPU Dtype"] == "None" and peer["NPU Dtype"] == "<class 'NoneType'>",
    ),
    Exempt(
        "statistics of another type",
        "Max and Min are shown as the numbers they are for the dtype: True and False for truth values, and for no other.",
        lambda column, ours, peer: (
            column
            in (*_STATISTICS, "Max diff", "Min diff", "MaxRelativeErr", "MinRelativeErr", "Result", "Err_message")
            and {"True", "False"} & {str(peer.get("NPU max")), str(peer.get("NPU min"))} != set()
            and ours["NPU Dtype"] != "torch.bool"
        ),
    ),
)
ROWS = (
    "A gradient that does not exist (null in the dump) is no value and has no row; the tool has a row of `None` for it.",
    "A reason and a message are said once a row; the tool says a reason once for each input, and the one of 0-d tensors 16 times.",
    "Messages are separated by one space and end without one; infinite numbers are `inf`, without the tab the tool puts behind them.",
)


def exemptions(column: str, ours: Row, peer: Row) -> list[Exempt]:
    """Every exemption that fits a cell."""
    return [each for each in EXCEPTIONS if each.fits(column, ours, peer)]


def document() -> str:
    """The table as docs/compare-legacy.md has it."""
    lines = [f"| {each.name} | {each.reason} |" for each in EXCEPTIONS]
    return "\n".join([BEGIN, "| | |", "|---|---|", *lines, *(f"| rows | {text} |" for text in ROWS), END])
