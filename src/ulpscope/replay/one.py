"""One call of a dump, run again: the rows of a ledger that it would have, for every way it was run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.frameworks.torch.replay_again import PRECISIONS, Repeated, is_tensor, raw_of, repeat, same_bits
from ulpscope.model.names import call_text
from ulpscope.model.records import CallRecord, Role
from ulpscope.store.call_site import place_of, products_of
from ulpscope.store.dump import Dump
from ulpscope.store.files.safetensors import Stored
from ulpscope.store.ledger_file import Row, row_of
from ulpscope.store.registry import open_dump

__all__ = ["PRECISIONS", "OneCall", "replay_call", "tensors_of"]


@dataclass(frozen=True, slots=True)
class OneCall:
    """A call and a row for each way it was run, the recorded one first; a way that failed has a row that says why.

    `same` tells whether the second way gave the recorded bits.
    """

    name: str
    dump: Dump
    call: CallRecord
    repeated: Repeated
    rows: dict[str, Row]
    same: bool


def replay_call(
    run: Path, name: str, *, step: int | None, rank: int | None, precision: str = "float64", device: str = "cpu"
) -> OneCall:
    """Runs a recorded call again. Raises DumpError where there is no such call, or it cannot be run."""
    dump = open_dump(run, step=step, rank=rank)
    call = dump.call(name)
    products = products_of(dump)
    repeated = repeat(call, dump.load_bits, products=products, precision=precision, device=device)
    rows = {}
    for way in repeated.ways:
        fields: dict[str, Any] = {**_about(dump, call), **place_of(dump, call), **repeated.row(way)}
        rows[way.name] = row_of({**fields, "unknown": way.trouble or None})
    return OneCall(call_text(call.id), dump, call, repeated, rows, same_bits(repeated.ways[0], repeated.ways[1]))


def _about(dump: Dump, call: CallRecord) -> dict[str, Any]:
    return {
        "seq": call.seq,
        "step": dump.manifest.step,
        "rank": dump.manifest.rank,
        "index": call.id.index,
        "call": call_text(call.id),
    }


def tensors_of(found: OneCall) -> dict[str, Stored]:
    """What a script needs to run the call without us: its inputs, what was recorded, and what float64 gives."""
    stored = {}
    for value in found.call.values:
        if value.is_tensor and value.slot.role is Role.INPUT:
            dtype, raw, shape = found.dump.raw(value)
            stored[".".join(["input", *map(str, value.slot.path)])] = Stored(dtype.name, shape, bytes(raw))
    recorded = found.repeated.ways[0].results
    for word, results in (("recorded", recorded), ("expected", found.repeated.wide)):
        for place, item in enumerate(results[: len(found.repeated.places)]):
            if is_tensor(item):
                stored[f"{word}.{place}"] = Stored(*raw_of(item))
    return stored
