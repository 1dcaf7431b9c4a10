"""The ledger of a run that was recorded at kernel level with its tensors: the same rows as live, from the dump alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ulpscope.errors import DumpError
from ulpscope.frameworks.torch.replay_recorded import RecordedCalls
from ulpscope.naming import MODULE, OPTIMIZER, call_text
from ulpscope.records import CallId, CallRecord, Phase
from ulpscope.store.ledger import Row, row_of
from ulpscope.store.reader import Dump, open_run


def rows_from_dumps(run: Path) -> list[Row]:
    """Rows of all steps and ranks. Raises DumpError where the run holds no kernels or no tensors."""
    dumps = sorted(open_run(run), key=lambda dump: (dump.manifest.rank, dump.manifest.step))
    if not any(dump.manifest.level == "kernel" and dump.manifest.config.get("tensors") for dump in dumps):
        raise DumpError(
            f"{run} holds neither a ledger nor kernels with their tensors; record it with "
            f"`ulpscope blame -o DIR -- CMD` or `ulpscope capture --level kernel --tensors -o DIR -- CMD`"
        )
    rows: list[Row] = []
    for rank in sorted({dump.manifest.rank for dump in dumps}):
        calls = RecordedCalls()
        mine = [dump for dump in dumps if dump.manifest.rank == rank]
        for dump in mine:
            calls.begin_step()
            rows += _rows(dump, calls, len(rows), first_step=dump is mine[0])
    return rows


def _rows(dump: Dump, calls: RecordedCalls, start: int, *, first_step: bool) -> Iterator[Row]:
    for number, call in enumerate(dump.calls()):
        if calls.is_kernel(call):
            fields = calls.fields(call, dump.load_bits, first_step=first_step)
            place = place_of(dump, call)
            about: dict[str, Any] = {"seq": start + number, "step": dump.manifest.step, "rank": dump.manifest.rank}
            about["call"] = call_text(call.id)
            yield row_of({**about, **place, **fields})


def place_of(dump: Dump, call: CallRecord) -> dict[str, Any]:
    """phase, api, module and source of a kernel: those of the call above it, or of the forward it belongs to."""
    above = call.origin if call.id.phase is Phase.BACKWARD else call.parent
    owner = None if above is None else dump.by_seq(above)
    module, phase, api = call.module, call.id.phase.value, ""
    walk = owner
    while walk is not None and walk.id.kind not in (MODULE, OPTIMIZER) and api == "":
        shown = CallId(walk.id.kind, walk.id.name, walk.id.index, call.id.phase)
        api = call_text(shown)
        module = module or walk.module
    if any(each.id.kind == OPTIMIZER for each in _ancestors(dump, call)):
        phase = "optimizer"
    frames = dump.stack(owner or call)
    frame = next((each for each in frames if "/torch/" not in each.file), frames[0] if frames else None)
    source = None if frame is None else (frame.file, frame.line, frame.function)
    return {"phase": phase, "api": api, "module": module, "source": source}


def _ancestors(dump: Dump, call: CallRecord) -> Iterator[CallRecord]:
    above = None if call.parent is None else dump.by_seq(call.parent)
    while above is not None:
        yield above
        above = None if above.parent is None else dump.by_seq(above.parent)
