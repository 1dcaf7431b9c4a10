"""A format that ulpscope does not know: JSON lines. With an entry point, every command reads it.

{"call": "Torch.mul.0.forward", "values": {"input.0": [1.0, 2.0], "output.0": [2.0, 4.0]}}

[project.entry-points."ulpscope.formats"]
jsonl = "jsonl_format:FORMAT"
"""

import json

import numpy as np

from ulpscope import call_text
from ulpscope.model.dtypes import DTYPES
from ulpscope.model.names import parse_call
from ulpscope.model.records import CallRecord, Manifest, Payload, Role, Slot, ToldStats, Value
from ulpscope.store.mapped import StoredBits
from ulpscope.store.registry import Format
from ulpscope.store.run_folder import DumpLocation


class JsonLines:
    format, missing = "jsonl", ()

    def __init__(self, location):
        self._rows = [json.loads(line) for line in location.folder.read_text().splitlines()]
        self._arrays = []  # in the order in which their values were asked for
        about = {"step": location.step, "rank": location.rank, "world_size": 1, "environment": {}}
        self.manifest = Manifest(1, "pytorch", "op", state="complete", config={"tensors": True}, **about)

    def ids(self):
        return [parse_call(row["call"]) for row in self._rows]

    def modules(self):
        return [""] * len(self._rows)

    def record(self, position):
        row = self._rows[position]
        values = tuple(self._value(Role(role), int(place), item) for role, place, item in _slots(row["values"]))
        return CallRecord(parse_call(row["call"]), position, None, None, "", values, stack=None, thread=0)

    def stack(self, call):
        return []

    def parent(self, call):
        return None

    def spelled(self, call):
        return call_text(call.id)

    def stored(self, value):
        array = self._arrays[value.payload.offset]
        return StoredBits(DTYPES["float32"], memoryview(array).cast("B"), array.shape)

    def _value(self, role, place, numbers):
        array = np.array(numbers, dtype="<f4")
        self._arrays.append(array)
        stats = ToldStats(array.size, float(array.max()), float(array.min()), float(array.mean()), norm=None)
        payload = Payload(len(self._arrays) - 1, array.nbytes)
        return Value(Slot(role, (place,)), "torch.Tensor", "torch.float32", array.shape, stats=stats, payload=payload)


def _slots(values):
    return [(*slot.split("."), numbers) for slot, numbers in values.items()]


def find(path):
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    return [DumpLocation(0, 0, copy, file) for copy, file in enumerate(files) if file.suffix == ".jsonl"]


FORMAT = Format("jsonl", find, JsonLines)
