"""What is shown of both runs beside a finding: calls with the lines of the program, values that both have."""

from __future__ import annotations

import numpy as np

from ulpscope.compare.value_graph import ValueGraph
from ulpscope.compare.values import Values
from ulpscope.findings.model import Anchor, CallPlace
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text
from ulpscope.model.records import CallRecord


def place_of(graph: ValueGraph, position: int) -> CallPlace:
    """A call, its module, and the line of the program that made it."""
    call = graph.dump.nth(position)
    try:
        stack = graph.dump.stack(call)
    except DumpError:
        stack = []  # the answer does without
    own = next((frame for frame in stack if not frame.library), stack[0] if stack else None)
    inner = next((frame for frame in stack if "/torch/" not in frame.file.replace("\\", "/")), own)
    return CallPlace(
        call_text(call.id),
        call.module,
        "" if inner is None else f"{inner.file}:{inner.line}",
        "" if inner is None else inner.text,
    )


def anchor_of(values: Values, node: int, partner: int) -> Anchor:
    """A value of the target and the one of the reference that it is."""
    sides = []
    for graph, each in ((values.reference, partner), (values.target, node)):
        maker = int(graph.maker[each])
        sides.append(call_text(graph.dump.nth(maker).id) if maker >= 0 else "from outside")
    error = float(values.anchors.error[node])
    return Anchor(sides[0], sides[1], int(values.target.numel[node]), error if np.isfinite(error) else 0.0)


def plain_name(call: CallRecord) -> str:
    """What a call does, without how it was written: add of Tensor.__add__, Aten.add.Tensor."""
    return call.id.name.partition(".")[0].strip("_")
