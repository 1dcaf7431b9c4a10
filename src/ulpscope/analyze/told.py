"""What differs between two runs before any arithmetic: arguments, weights, masks, seeds, calls that only one side makes.

A replay cannot see these, the kernel did what it was told. What follows from values (a shape after a choice, a number read
back from a tensor) is not compared: that was computed, and computing is judged elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ulpscope.analyze.limits import UNITS
from ulpscope.model.operators import Trait, traits
from ulpscope.store.ledger_file import Leaf, Row

Key = tuple[int, int, str, str, str, int]
Told = tuple[Row, str, float]
_SETS = 1e9  # nothing about it is a matter of degree


def keyed(rows: Sequence[Row]) -> dict[Key, Row]:
    """Every row by what it is in its module: an extra call in one module does not shift the others."""
    counts: Counter[tuple[Any, ...]] = Counter()
    found: dict[Key, Row] = {}
    for row in rows:
        part = (row.rank, row.step, row.phase, row.module or row.param or "", row.op)
        found[(*part, counts[part])] = row
        counts[part] += 1
    return found


def told_differently(reference: Sequence[Row], target: Sequence[Row]) -> Iterator[Told]:
    """Rows of the target that were told something else, in order, with the reason and how far it is from a rounding."""
    partners = keyed(reference)
    mixed = _other_precision(partners, target)
    read_back: set[int] = set()
    decided: set[int] = set()
    missing = _calls_apart(reference, target, mixed)
    inside = _inside(reference), _inside(target)
    for key, row in keyed(target).items():
        if row.decides:
            decided.add(row.rank)
            if row.name in ("_local_scalar_dense", "is_nonzero"):
                read_back.add(row.rank)
        partner = partners.get(key)
        why = None
        if partner is not None:
            # The same call by other kernels, as attention on another device is: what these were told says nothing.
            alike = inside[0].get(_within(partner)) == inside[1].get(_within(row))
            told = alike and _arguments(partner, row, mixed, row.rank in read_back, row.rank in decided)
            why = told or _leaves(partner, row)
        elif row.rank not in decided and row.phase == "forward":
            why = missing.get((row.rank, row.step, row.module, _api(row)))
        if why:
            yield row, why, _SETS


def _within(row: Row) -> tuple[int, int, str, str]:
    return row.rank, row.step, row.phase, row.api


def _inside(rows: Sequence[Row]) -> dict[tuple[int, int, str, str], int]:
    """The kernels of each API call, in order, as a number: a recurrent layer has thousands of them."""
    found: defaultdict[tuple[int, int, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.api:
            found[_within(row)].append(row.op)
    return {key: hash(tuple(names)) for key, names in found.items()}


def _other_precision(partners: dict[Key, Row], target: Sequence[Row]) -> bool:
    """Whether the two runs are meant to have different precision: most weights and inputs have another dtype."""
    same = other = 0
    for key, row in keyed(target).items():
        there = {leaf.place: leaf for leaf in partners[key].leaves} if row.leaves and key in partners else {}
        for leaf in row.leaves:
            if leaf.place in there and leaf.dtype in UNITS:
                same += leaf.dtype == there[leaf.place].dtype
                other += leaf.dtype != there[leaf.place].dtype
    return other > same


def _api(row: Row) -> str:
    return row.api.rsplit(".", 2)[0] if row.api else ""


def _calls_apart(reference: Sequence[Row], target: Sequence[Row], mixed: bool) -> dict[tuple[int, int, str, str], str]:
    """API calls that one side makes more often in a module than the other."""

    def counted(rows: Sequence[Row]) -> dict[tuple[int, int, str, str], int]:
        names: defaultdict[tuple[int, int, str, str], set[str]] = defaultdict(set)
        for row in rows:
            copied = _only_copies(row) or (mixed and Trait.CASTS in traits(row.api))
            if row.phase == "forward" and row.api and not copied:
                names[row.rank, row.step, row.module, _api(row)].add(row.api)
        return {key: len(found) for key, found in names.items()}

    ours, theirs = counted(target), counted(reference)
    return {
        key: f"called {count} times here, {theirs.get(key, 0)} times in the reference"
        for key, count in ours.items()
        if count != theirs.get(key, 0)
    }


def _only_copies(row: Row) -> bool:
    """Whether a tensor has to be copied to be contiguous, or to another device, is a matter of memory."""
    same = row.scalars.get("dtype") in (None, f"torch.{row.dtypes}")
    return row.name == "clone" or (row.name == "_to_copy" and same)


def _arguments(reference: Row, target: Row, mixed: bool, read_back: bool, decided: bool) -> str | None:
    if target.phase == "backward" or (target.phase == "optimizer" and target.step > 0 and read_back):
        return None
    if not mixed and reference.dtypes != target.dtypes and target.kind != "view":
        return f"reads {target.dtypes or 'no floats'}, the reference reads {reference.dtypes or 'no floats'}"
    if None not in (reference.seed, target.seed) and reference.seed != target.seed:
        return f"its generator has the seed {target.seed}, in the reference {reference.seed}"
    for name in sorted(set(reference.scalars) | set(target.scalars)):
        here, there = target.scalars.get(name), reference.scalars.get(name)
        if name == "generator" and (here is None or there is None):
            continue  # not every ledger tells its state
        if not _same(there, here, mixed, read_back, decided):
            return f"{name} = {_shown(here)}, the reference has {_shown(there)}"
    return None


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _same(there: Any, here: Any, mixed: bool, read_back: bool, decided: bool) -> bool:
    if there == here:
        return True
    if isinstance(there, list) and isinstance(here, list):
        return decided or (
            len(there) == len(here)
            and all(_same(a, b, mixed, read_back, decided) for a, b in zip(there, here, strict=True))
        )
    numbers = isinstance(there, int | float) and isinstance(here, int | float)
    if not numbers:
        # A dtype, a limit of a dtype written as text, or an argument that only one side passes.
        return mixed and isinstance(here, str) and isinstance(there, str)
    if isinstance(there, int) and isinstance(here, int):
        return decided
    size = max(abs(there), abs(here))
    if mixed and size > 1e4 and min(abs(there), abs(here)) > 1e4 and (there < 0) == (here < 0):
        return True  # the largest number of the dtype, as masks use it
    allowed = 2.0**-6 if read_back else 1e-12
    return bool(abs(there - here) <= allowed * size)


def _leaves(reference: Row, target: Row) -> str | None:
    others = {leaf.place: leaf for leaf in reference.leaves}
    for leaf in target.leaves:
        other = others.get(leaf.place)
        if other is not None and not _equal(other, leaf):
            name = leaf.name or other.name
            what = f"the values of {name}" if name else f"its input {leaf.place}"
            return f"{what} differ from those of the reference, and no call computed them"
    return None


def _equal(there: Leaf, here: Leaf) -> bool:
    """Equal bits; with another dtype, equal up to the rounding of the lower one."""
    if there.shape != here.shape:
        return False
    if there.dtype == here.dtype:
        return there.crc == here.crc
    unit = max(UNITS.get(there.dtype, 0.0), UNITS.get(here.dtype, 0.0))
    if not unit or here.norm < 0:
        return True
    allowed = 4 * unit * max(there.norm, here.norm)
    return all(abs(a - b) <= allowed for a, b in zip(there.sketch, here.sketch, strict=False)) and math.isfinite(
        here.norm
    )
