"""What two dumps have in common by their values: both graphs, the anchors between them, and which module is which. Made when asked for."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from ulpscope.compare.anchors import Anchors, find_anchors
from ulpscope.compare.settings import SettingDifference, coarse_settings
from ulpscope.compare.value_graph import FORWARD, ValueGraph
from ulpscope.model.names import MODULE
from ulpscope.model.records import CallId, Phase
from ulpscope.store.dump import Dump

# Wrappers put these into the names of modules; a run with one and a run without are the same model.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_NUMBER = re.compile(r"\d+")


def plain_module(name: str) -> str:
    """A module's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class Values:
    """The values of two dumps."""

    def __init__(self, reference: Dump, target: Dump) -> None:
        self._dumps = reference, target
        # Whether some calls have no counterpart: only then values are looked for that are made of several.
        self.is_apart = False

    @cached_property
    def reference(self) -> ValueGraph:
        return ValueGraph(self._dumps[0])

    @cached_property
    def target(self) -> ValueGraph:
        return ValueGraph(self._dumps[1])

    @cached_property
    def settings(self) -> list[SettingDifference]:
        """The precision settings that make one run's results coarser than the other's."""
        return coarse_settings(*(dump.manifest for dump in self._dumps))

    @cached_property
    def anchors(self) -> Anchors:
        return find_anchors(self.reference, self.target, with_relations=self.is_apart)

    @cached_property
    def contents(self) -> list[int]:
        """Of each value of the reference the first that has the same numbers."""
        graph, seen = self.reference, dict[bytes, int]()
        rows = zip(graph.numbers, graph.numel.tolist(), strict=True)
        return [seen.setdefault(row.tobytes() + str(numel).encode(), node) for node, (row, numel) in enumerate(rows)]

    def content_of(self, node: int) -> int | None:
        """What value of the reference one of the target is; None where it is none, or several."""
        partners = self.anchors.partners.get(node, ())
        return self.contents[partners[0]] if len(partners) == 1 else None

    @cached_property
    def modules(self) -> dict[str, str]:
        """Of modules of the target their names in the reference: the same where both have it, else the one that gives the same from
        the same. What holds in one layer is expected in all."""
        ours, theirs = (module_paths(dump) for dump in self._dumps[::-1])
        known = {name: name for name in ours if name in theirs}
        lacking = [name for name in ours if name not in theirs]
        if not lacking or len(known) == len(theirs):
            return known
        return known | self._found(set(lacking), set(theirs) - known.keys())

    def _found(self, lacking: set[str], free: set[str]) -> dict[str, str]:
        theirs: defaultdict[tuple[object, object], list[str]] = defaultdict(list)
        for name, ins, outs in _calls(self.reference, self._dumps[0]):
            if name in free:
                for key in _keys([self.contents[node] for node in ins], [self.contents[node] for node in outs]):
                    theirs[key].append(name)
        votes: Counter[tuple[str, str]] = Counter()
        patterns: Counter[tuple[str, str]] = Counter()
        for name, ins, outs in _calls(self.target, self._dumps[1]):
            if name not in lacking:
                continue
            keys = _keys([self.content_of(node) for node in ins], [self.content_of(node) for node in outs])
            for other in dict.fromkeys(other for key in keys for other in theirs.get(key, ())):
                # Of modules one in the other, which read and give the same, the outer is the outer.
                weight = 2 if name.count(".") == other.count(".") else 1
                votes[name, other] += weight
                if _NUMBER.findall(name) == _NUMBER.findall(other):
                    patterns[_NUMBER.sub("#", name), _NUMBER.sub("#", other)] += weight
        for name, other in self._makers(lacking, free):
            votes[name, other] += 1
            if _NUMBER.findall(name) == _NUMBER.findall(other):
                patterns[_NUMBER.sub("#", name), _NUMBER.sub("#", other)] += 1
        return _settled(votes, patterns, lacking, free)

    def _makers(self, lacking: set[str], free: set[str]) -> Iterator[tuple[str, str]]:
        """The modules in which the two sides make the same value: of runs without calls of modules there is nothing better."""
        theirs, ours = (list(map(plain_module, dump.modules())) for dump in self._dumps)
        for node, partners in self.anchors.partners.items():
            mine, other = int(self.target.maker[node]), int(self.reference.maker[partners[0]])
            if len(partners) == 1 and mine >= 0 and other >= 0 and ours[mine] in lacking and theirs[other] in free:
                yield ours[mine], theirs[other]


def _settled(
    votes: Counter[tuple[str, str]], patterns: Counter[tuple[str, str]], lacking: set[str], free: set[str]
) -> dict[str, str]:
    """Each name once, those first of which most is known; names alike but for their numbers go together."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for (mine, theirs), _ in patterns.most_common():
        for name in sorted(lacking - found.keys()):
            if _NUMBER.sub("#", name) != mine:
                continue
            numbers = iter(_NUMBER.findall(name))
            other = re.sub("#", lambda _: next(numbers), theirs)  # noqa: B023
            if other in free and other not in taken:
                found[name] = other
                taken.add(other)
    for (name, other), _ in votes.most_common():
        if name not in found and other not in taken:
            found[name] = other
            taken.add(other)
    return found


def module_paths(dump: Dump) -> list[str]:
    """The paths of all modules of a dump, without what wrappers add, in the order in which they are seen."""
    names = [plain_module(call.name).rpartition(".")[0] for call in dump.ids() if call.kind == MODULE]
    return list(dict.fromkeys([*names, *map(plain_module, dump.modules())]))


def _calls(graph: ValueGraph, dump: Dump) -> list[tuple[str, Sequence[int], Sequence[int]]]:
    """The forward calls of modules: path, and the values that tell something of what it read and gave."""

    def telling(nodes: Sequence[int]) -> list[int]:
        return [node for node in nodes if graph.is_telling[node]]

    return [
        (path_of(call), telling(graph.inputs[position]), telling(graph.outputs[position]))
        for position, call in enumerate(dump.ids())
        if call.kind == MODULE and call.phase is Phase.FORWARD and graph.phases[position] == FORWARD
    ]


def path_of(call: CallId) -> str:
    """The path of the module that a call is of."""
    return plain_module(call.name).rpartition(".")[0]


def _keys(ins: Sequence[int | None], outs: Sequence[int | None]) -> list[tuple[object, object]]:
    """What two calls of one module have in common: what it read and what it gave."""
    return [(ins[0], outs[0])] if ins and outs and ins[0] is not None and outs[0] is not None else []
