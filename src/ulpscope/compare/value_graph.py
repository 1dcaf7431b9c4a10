"""A dump as a graph of values, in columns: a node is one measured content, an edge says that a call read one and wrote the other.

Calls that hold others are left out where those tell how their outputs came about. Gradients that torch sums between calls hang on
the gradients that were summed. Reads statistics only; elements and sketches stay where they are.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import round_off
from ulpscope.model.names import INIT, MODULE, OPTIMIZER
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import CallId, CallRecord, Phase, Role, Slot, Value
from ulpscope.store.dump import Dump

FORWARD, BACKWARD, STEP = range(3)
# Of fewer elements, or of a mask's filling, statistics say too little.
FEW, FILLED = 8, 1e30
_GRADIENTS = frozenset({Phase.BACKWARD, Phase.PARAMETERS_GRAD})
# Weights kept as whole numbers with a scale: what is made of them is as coarse as bfloat16.
_QUANTIZED = frozenset({"torch.int8", "torch.qint8", "torch.quint8"})
_COARSE = 2.0**-8


def is_overwritten(call: CallId, slot: Slot) -> bool:
    """Whether a call overwrites this input without reading it."""
    if call.phase is Phase.BACKWARD and call.kind != "Aten":
        return False
    if slot.path == (0,):
        return call.kind == INIT or Trait.FILLS in traits(call.name)
    return slot.path[:1] == ("out",) or (call.kind == INIT and slot.path == ("tensor",))


def key_of(value: Value) -> Hashable | None:
    """What two values of one run have in common that are one content; None for what was not measured."""
    if value.shape is None:
        return None
    if value.measure is not None:
        return value.measure
    stats = value.stats
    if stats is None:
        return value.checksum
    return stats.numel, stats.max, stats.min, stats.mean, stats.norm, value.checksum


class Ragged:
    """A list of whole numbers for each of many rows, in two arrays."""

    def __init__(self) -> None:
        self._starts, self._items = array("q", [0]), array("q")

    def add(self, items: Iterable[int]) -> None:
        self._items.extend(items)
        self._starts.append(len(self._items))

    def __getitem__(self, row: int) -> array[int]:
        return self._items[self._starts[row] : self._starts[row + 1]]

    def __len__(self) -> int:
        return len(self._starts) - 1


@dataclass(frozen=True, slots=True)
class Around:
    """The edges of a graph in one direction."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def of(self, node: int) -> list[int]:
        found: list[int] = self.ends[self.starts[node] : self.starts[node + 1]].tolist()
        return found


def around(tails: NDArray[np.int64], heads: NDArray[np.int64], count: int) -> Around:
    """For each of `count` nodes the heads of the edges that begin there."""
    order = np.argsort(tails, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(tails, minlength=count))])
    return Around(starts.astype(np.int64), heads[order])


class ValueGraph:
    """The values of one dump. Columns by node; `inputs` and `outputs` are the nodes of each call, by its position."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self._node: dict[Hashable, int] = {}
        self._numel, self._order, self._phase = array("q"), array("q"), array("b")
        self._measure, self._crc, self._zeros = array("q"), array("q"), array("q")
        self._numbers, self._unit = array("d"), array("d")
        self._maker = array("q")
        self._tails, self._heads = array("q"), array("q")
        self.inputs, self.outputs, self._gradients = Ragged(), Ragged(), dict[Hashable, int]()
        self.seqs, self.parents, self.origins = array("q"), array("q"), array("q")
        self.kinds, self.phases = bytearray(), bytearray()
        self._lists: dict[int, tuple[list[object], dict[object, list[int]]]] = {}
        # Calls whose results tell little of what they were made of.
        self.reductions: set[int] = set()
        self.roots: set[int] = set()
        self._stepping: set[int] = set()
        self.weights: set[int] = set()
        for position, call in enumerate(dump.calls()):
            self._read(position, call)
        self._position = {seq: position for position, seq in enumerate(self.seqs)}
        self._link()
        count = len(self._numel)
        self.numel = np.array(self._numel, dtype=np.int64)
        self.order = np.array(self._order, dtype=np.int64)
        self.phase = np.array(self._phase, dtype=np.int8)
        self.measure = np.array(self._measure, dtype=np.int64)
        self.crc = np.array(self._crc, dtype=np.int64)
        self.zeros = np.array(self._zeros, dtype=np.int64)
        self.unit = np.array(self._unit, dtype=np.float64)
        self.maker = np.array(self._maker, dtype=np.int64)
        self.numbers = np.array(self._numbers, dtype=np.float64).reshape(count, 4)
        largest, smallest, _, norm = self.numbers.T
        with np.errstate(invalid="ignore"):
            self.is_known = np.isfinite(self.numbers).all(axis=1) & (norm < FILLED) & (self.unit > 0)
            self.is_telling = self.is_known & (self.numel >= FEW) & (largest != smallest)
        tails, heads = np.array(self._tails, dtype=np.int64), np.array(self._heads, dtype=np.int64)
        self.before, self.after = around(heads, tails, count), around(tails, heads, count)
        for name in (
            "_numel",
            "_order",
            "_phase",
            "_measure",
            "_crc",
            "_zeros",
            "_unit",
            "_maker",
            "_numbers",
            "_tails",
            "_heads",
        ):
            delattr(self, name)

    def __len__(self) -> int:
        return len(self.numel)

    def node(self, value: Value) -> int | None:
        """The node of a value; None of what was not measured."""
        return self.number_of(key_of(value))

    def number_of(self, key: Hashable | None) -> int | None:
        """The node of a content."""
        return None if key is None else self._node.get(key)

    @property
    def gradient_nodes(self) -> set[int]:
        """The gradients of parameters, as the last pass left them."""
        return set(self._gradients.values())

    def position(self, seq: int) -> int | None:
        """The position of the call with an execution number."""
        return self._position.get(seq)

    def sketch(self, node: int) -> NDArray[np.float32] | None:
        """The sketch of a node; None where there is none."""
        measure = int(self.measure[node])
        return None if measure < 0 else self.dump.sketch(Value(_ANY, "torch.Tensor", measure=measure))

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(self, position: int, call: CallRecord) -> None:
        self.seqs.append(call.seq)
        self.parents.append(-1 if call.parent is None else call.parent)
        self.origins.append(-1 if call.origin is None else call.origin)
        gradients = call.id.phase is Phase.PARAMETERS_GRAD
        self.kinds.append(_PARAMETERS if gradients else _kind(call.id.kind))
        phase = self._phase_of(call)
        self.phases.append(phase)
        ins, outs = list[int](), list[int]()
        for value in call.values:
            key = key_of(value)
            if key is None:
                continue
            node = self._node.get(key)
            if node is None:
                node = self._add(key, value, position, phase)
            if gradients or value.slot.role is Role.OUTPUT:
                outs.append(node)
            elif not is_overwritten(call.id, value.slot):
                ins.append(node)
                if value.slot.role is Role.PARAMETERS:
                    self.weights.add(node)
        if Trait.AVERAGES in traits(call.id.name) and call.id.phase is Phase.FORWARD:
            self.reductions.add(position)
        if call.id.name.startswith(_LISTS):
            self._lists[position] = _by_item(call, self._node)
        if gradients:
            # Of gradients that are summed over several passes the last is the one that counts.
            self._gradients.update(((call.id.name, at), node) for at, node in enumerate(outs))
        elif call.id.kind == MODULE and call.parent is None and phase == FORWARD:
            self.roots.update(outs)
        self.inputs.add(ins)
        self.outputs.add(outs)

    def _phase_of(self, call: CallRecord) -> int:
        if call.id.phase in _GRADIENTS:
            return BACKWARD
        if call.id.kind == OPTIMIZER or call.id.phase is Phase.STEP:
            self._stepping = {call.seq}
            return STEP
        if call.parent in self._stepping:
            self._stepping.add(call.seq)
            return STEP
        return FORWARD

    def _add(self, key: Hashable, value: Value, position: int, phase: int) -> int:
        node = self._node[key] = len(self._numel)
        stats = value.stats
        numbers = (None,) * 4 if stats is None else (stats.max, stats.min, stats.mean, stats.norm)
        self._numel.append(math.prod(value.shape or ()) if stats is None else stats.numel)
        self._numbers.extend(math.nan if each is None else float(each) for each in numbers)
        self._zeros.append(stats.zero_count if stats is not None and stats.counted else -1)
        self._crc.append(-1 if value.checksum is None else value.checksum)
        self._measure.append(-1 if value.measure is None else value.measure)
        self._unit.append(_COARSE if value.dtype in _QUANTIZED else round_off(value.dtype))
        self._order.append(position)
        self._phase.append(phase)
        self._maker.append(-1)
        return node

    # --- edges --------------------------------------------------------------------------------------------------

    def is_leaf(self, position: int) -> bool:
        """Whether no recorded call was made inside a call, or inside the forward of a backward call."""
        origin = self.origins[position]
        return (self.seqs[position] if origin < 0 else origin) not in self._holders

    def _link(self) -> None:
        self._holders = set(self.parents)
        self._holders.discard(-1)
        inner: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        later = []
        for position in range(len(self.seqs)):
            if self.is_sum(position):
                later.append(position)
            elif self.is_leaf(position):
                self._make(position, self.inputs[position])
            else:
                later.append(position)
            if self.parents[position] >= 0:
                inner[self.parents[position], self.phases[position]].append(position)
        for position in reversed(later):
            outs = self.outputs[position]
            if self.is_sum(position) or all(self._maker[node] >= 0 for node in outs):
                continue
            own = self.seqs[position] if self.origins[position] < 0 else self.origins[position]
            held = inner.get((own, self.phases[position]), ())
            given = [node for each in held for node in self.outputs[each]]
            self._make(position, [*self.inputs[position], *given])
        self._link_sums(later)

    def is_sum(self, position: int) -> bool:
        """Whether a position is no call but the gradients of a module's parameters."""
        return self.kinds[position] == _PARAMETERS

    def _make(self, position: int, ins: Iterable[int]) -> None:
        known = set(ins)
        lists = self._lists.get(position)
        for place, node in enumerate(self.outputs[position]):
            if node in known:
                continue
            if self._maker[node] < 0:
                self._maker[node] = position
            read = known if lists is None else set(lists[1].get(lists[0][place], ()))
            self._tails.extend(read)
            self._heads.extend([node] * len(read))

    def _link_sums(self, later: Iterable[int]) -> None:
        """What torch sums between calls: the gradient of a value from those of its readers, of a parameter from those of its uses."""
        position = self._position
        back: defaultdict[int, list[int]] = defaultdict(list)
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for place in range(len(self.seqs)):
            if self.phases[place] == BACKWARD:
                if self.origins[place] >= 0 and self.is_leaf(place):
                    back[self.origins[place]].append(place)
            elif self.phases[place] == FORWARD and self.is_leaf(place):
                for node in set(self.inputs[place]):
                    readers[node].append(self.seqs[place])
        for seq, places in back.items():
            made = self.outputs[position[seq]] if seq in position else ()
            wanted = [node for place in places for node in self.inputs[place] if self._maker[node] < 0]
            if not wanted or not made:
                continue
            terms = {
                out
                for node in set(made)
                for reader in readers.get(node, ())
                for each in back.get(reader, ())
                for out in self.outputs[each]
            }
            self._sum(terms, wanted)
        self._link_parameters(later, back, readers)

    def _link_parameters(self, later: Iterable[int], back: dict[int, list[int]], readers: dict[int, list[int]]) -> None:
        """The gradient of a parameter hangs on what the backward of the calls gave that ran in its module, if it has its size."""
        sums = [place for place in later if self.is_sum(place)]
        if not sums:
            return
        modules = self.dump.modules()
        ids = self.dump.ids()
        given: defaultdict[str, list[int]] = defaultdict(list)
        for places in back.values():
            for place in places:
                given[modules[place]] += self.outputs[place]
        for place in sums:
            module = ids[place].name.rpartition(".")[0]
            wanted = [node for node in self.outputs[place] if self._maker[node] < 0]
            self._sum(set(given.get(module, ())), wanted)
            for node in wanted:
                self._maker[node] = place

    def _sum(self, terms: set[int], sums: Iterable[int]) -> None:
        for node in set(sums):
            fitting = [term for term in terms if self._numel[term] == self._numel[node] and term != node]
            self._tails.extend(fitting)
            self._heads.extend([node] * len(fitting))

    def reach(
        self,
        edges: Around,
        begin: Iterable[int],
        within: NDArray[np.bool_] | None = None,
        stop: Set[int] = frozenset(),
    ) -> NDArray[np.bool_]:
        """The nodes that some lead to along edges, those some included, without leaving `within` or going on from what the calls of
        `stop` made."""
        seen = np.zeros(len(self), dtype=bool)
        todo = [node for node in begin if within is None or within[node]]
        seen[todo] = True
        while todo:
            node = todo.pop()
            if self.maker[node] in stop:
                continue
            for other in edges.of(node):
                if not seen[other] and (within is None or within[other]):
                    seen[other] = True
                    todo.append(other)
        return seen

    def made(self) -> Iterator[int]:
        """The nodes that a recorded call wrote."""
        yield from np.flatnonzero(self.maker >= 0).tolist()


# Calls that do the same to each item of a list.
_LISTS = ("_foreach_", "_fused_")


def _by_item(call: CallRecord, nodes: dict[Hashable, int]) -> tuple[list[object], dict[object, list[int]]]:
    """The item that each output belongs to, and what was read of each."""
    outs: list[object] = []
    ins: dict[object, list[int]] = {}
    for value in call.values:
        key = key_of(value)
        if key is None:
            continue
        item = value.slot.path[-1]
        if value.slot.role is Role.OUTPUT:
            outs.append(item)
        else:
            ins.setdefault(item, []).append(nodes[key])
    return outs, ins


_ANY = Slot(Role.OUTPUT, ())
_PLAIN, _MODULE, _OPTIMIZER, _PARAMETERS = range(4)


def _kind(kind: str) -> int:
    return _MODULE if kind == MODULE else _OPTIMIZER if kind == OPTIMIZER else _PLAIN
