"""Where a recorded call belongs: its phase, the API call above a kernel, its module and the line of the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ulpscope.model.names import MODULE, OPTIMIZER, call_text
from ulpscope.model.records import CallId, CallRecord, Phase
from ulpscope.store.dump import Dump

_KERNELS = {"Aten": "aten", "NPU": "npu"}
_APIS = frozenset({"Functional", "Torch", "Tensor", "VF", "Distributed", "Init"})
_AROUND = frozenset({MODULE, OPTIMIZER})


def is_replayable(dump: Dump) -> bool:
    """Whether kernels can be run again from it: it has them, with their tensors."""
    return dump.manifest.level == "kernel" and bool(dump.manifest.config.get("tensors"))


def products_of(dump: Dump) -> dict[str, str]:
    """What the run allowed factors of products of float32 to be rounded to, by device and kind."""
    flags = dump.manifest.environment.get("flags")
    found = flags.get("float32_products") if isinstance(flags, dict) else None
    return found if isinstance(found, dict) else {}


def op_of(call: CallRecord) -> str:
    """`aten.mm.default` for a kernel, `Functional.linear` for a call of the API."""
    return f"{_KERNELS.get(call.id.kind, call.id.kind)}.{call.id.name}"


def place_of(dump: Dump, call: CallRecord) -> dict[str, Any]:
    """phase, api, module and source: those of a kernel are of the call above it, or of the forward it belongs to."""
    if call.id.kind in _APIS | _AROUND:
        return {**_place(dump, call, call), "api": call_text(call.id) if call.id.kind in _APIS else ""}
    above = call.origin if call.id.phase is Phase.BACKWARD else call.parent
    owner = None if above is None else dump.by_seq(above)
    place = _place(dump, call, owner or call)
    if owner is not None and owner.id.kind not in _AROUND:
        place["api"] = call_text(CallId(owner.id.kind, owner.id.name, owner.id.index, call.id.phase))
        place["module"] = place["module"] or owner.module
    return place


def _place(dump: Dump, call: CallRecord, owner: CallRecord) -> dict[str, Any]:
    phase = call.id.phase.value
    if any(each.id.kind == OPTIMIZER for each in _ancestors(dump, call)):
        phase = "optimizer"
    frames = dump.stack(owner)
    frame = next((each for each in frames if "/torch/" not in each.file), frames[0] if frames else None)
    source = None if frame is None else (frame.file, frame.line, frame.function)
    module = call.id.name.rpartition(".")[0] if call.id.kind == MODULE else call.module
    return {"phase": phase, "api": "", "module": module, "source": source}


def _ancestors(dump: Dump, call: CallRecord) -> Iterator[CallRecord]:
    above = None if call.parent is None else dump.by_seq(call.parent)
    while above is not None:
        yield above
        above = None if above.parent is None else dump.by_seq(above.parent)
