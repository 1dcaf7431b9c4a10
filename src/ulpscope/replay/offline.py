"""The ledger of a run that was recorded at kernel level with its tensors: the same rows as live, from the dump alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ulpscope.frameworks.torch.replay_recorded import RecordedCalls
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text
from ulpscope.store.call_site import is_replayable, place_of, products_of
from ulpscope.store.dump import Dump
from ulpscope.store.ledger_file import Row, row_of
from ulpscope.store.registry import open_run


def rows_from_dumps(run: Path) -> list[Row]:
    """Rows of all steps and ranks. Raises DumpError where the run holds no kernels or no tensors."""
    dumps = sorted(open_run(run), key=lambda dump: (dump.manifest.rank, dump.manifest.step))
    if not any(map(is_replayable, dumps)):
        raise DumpError(
            f"{run} holds neither a ledger nor kernels with their tensors; record it with "
            f"`ulpscope blame -o DIR -- CMD` or `ulpscope capture --level kernel --tensors -o DIR -- CMD`"
        )
    rows: list[Row] = []
    for rank in sorted({dump.manifest.rank for dump in dumps}):
        mine = [dump for dump in dumps if dump.manifest.rank == rank]
        calls = RecordedCalls(products_of(mine[0]))
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
