"""What the comparison of two runs came to: the answer that the panel, the JSON and the exit code all tell."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulpscope.compare.comparison import Evidence, Level
from ulpscope.findings.model import Divergence, Finding, Status
from ulpscope.findings.ranks import Origin
from ulpscope.findings.steadiness import Choice
from ulpscope.model.names import call_text
from ulpscope.model.records import Frame

_CHOSEN = (
    "its inputs differ by rounding alone, and it decided otherwise: what follows is other work, not an error; give both runs the same "
    "decisions to compare it"
)


class Answer(enum.Enum):
    """The answer, with its exit code."""

    AGREES = ("agrees", 0)
    DIFFERS = ("differs", 1)
    INCOMPLETE = ("incomplete", 3)
    NOTHING = ("nothing to compare", 4)

    @property
    def text(self) -> str:
        return self.value[0]

    @property
    def exit_code(self) -> int:
        return self.value[1]


@dataclass(frozen=True, slots=True)
class UnitOutcome:
    """One step of one rank: what was found, the stacks of the findings, and how the two dumps end.

    `missing`: how many files with elements the reference, and the target, should have and have not whole."""

    divergence: Divergence
    stacks: dict[int, tuple[Frame, ...]] = field(default_factory=dict)
    endings: tuple[str, ...] = ()
    surroundings: tuple[tuple[str, Any, Any], ...] = ()
    artefacts: tuple[Path, ...] = ()
    missing: tuple[int, int] = (0, 0)

    @property
    def unsure(self) -> str:
        """Why one cannot be sure that nothing differs; nothing where one can."""
        found = self.divergence
        said = list(self.endings)
        if found.statuses[Status.CHOICE] or found.statuses[Status.OTHER]:
            said.append(f"{found.statuses[Status.OTHER]} calls did other work, after a decision within rounding")
        if found.unknown_count or any(self.missing):
            said.append(f"{found.unknown_count} values could not be compared")
        if found.unsure and not found.findings:
            said.append("what differs is more than what is known of it explains")
        if not found.calls:
            said.append("there is nothing to compare")
        return "; ".join(said)

    @property
    def differs(self) -> bool:
        """What a dump lacks that was cut off, or recorded with other options, is no difference; nor is rounding that is carried on
        where the two ran in the same surroundings, or until it decides something."""
        return self.divergence.differs


@dataclass(frozen=True, slots=True)
class Outcome:
    """All units of two runs."""

    reference: str
    target: str
    units: tuple[UnitOutcome, ...]
    only_reference: tuple[str, ...] = ()
    only_target: tuple[str, ...] = ()
    origin: Origin = field(default_factory=Origin)

    @property
    def first(self) -> Finding | None:
        """Where it begins, over all steps and ranks."""
        return self.origin.first

    @property
    def choice(self) -> Choice | None:
        """The first decision that fell otherwise."""
        return next((found for unit in self.units if (found := unit.divergence.steadiness.choice) is not None), None)

    @property
    def remarks(self) -> list[tuple[Divergence, tuple[str, str]]]:
        """Of what one should know, though nothing follows from it: where, about which call, and what."""
        told: dict[object, tuple[Divergence, tuple[str, str]]] = {}
        for unit in self.units:
            for why, error in unit.divergence.settings.items():
                told.setdefault(why, (unit.divergence, ("settings", f"{why}; measured {error:.1e}")))
        for unit in self.units:
            found = unit.divergence
            choice = found.steadiness.choice
            if choice is not None and Status.CHOICE not in told:
                told[Status.CHOICE] = found, (call_text(choice.comparison.match.call.id), _CHOSEN)
        # The first of them: in later steps a model begins with other parameters, of which its own call does not tell.
        unsteady = [
            unit.divergence
            for unit in self.units
            if unit.divergence.steadiness.unsteady and not unit.surroundings and not any(self.alone)
        ]
        for found in unsteady[:1]:
            for first, text in found.steadiness.remarks:
                told[id(first)] = found, (call_text(first.match.call.id), text)
        return [*told.values(), *((unit.divergence, each) for unit in self.units for each in unit.divergence.remarks)]

    @property
    def modules(self) -> dict[str, str]:
        """Modules that are called otherwise in the reference, by their name in the target."""
        return {mine: theirs for unit in self.units for mine, theirs in unit.divergence.modules.items()}

    @property
    def statuses(self) -> Counter[Status]:
        """How many calls are what."""
        return sum((unit.divergence.statuses for unit in self.units), Counter())

    @property
    def evidence(self) -> Counter[Evidence]:
        return sum((unit.divergence.evidence for unit in self.units), Counter())

    @property
    def levels(self) -> Counter[Level]:
        return sum((unit.divergence.levels for unit in self.units), Counter())

    @property
    def calls(self) -> int:
        return sum(unit.divergence.calls for unit in self.units)

    @property
    def values(self) -> int:
        return sum(unit.divergence.values for unit in self.units)

    @property
    def alone(self) -> tuple[int, int]:
        """Calls that the reference alone has, and that the target alone has."""
        found = [unit.divergence for unit in self.units]
        return sum(each.only_reference for each in found), sum(each.only_target for each in found)

    @property
    def suspects(self) -> list[Finding]:
        """At most ten of the step where it begins: the first, then the heaviest."""
        others = [each for each in self.origin.findings if each is not self.first]
        others.sort(key=lambda each: (each.status is not Status.SOURCE, -each.weight, each.rank))
        return ([self.first] if self.first is not None else []) + others[: 9 if self.first is not None else 10]

    @property
    def differences(self) -> list[tuple[str, Any, Any]]:
        """What the two runs' options and environments have different, each once."""
        return list(dict.fromkeys(each for unit in self.units for each in unit.surroundings))

    @property
    def lacks(self) -> list[str]:
        """What cannot be said for sure: how dumps end that are not complete, and how many files are gone."""
        found = sorted({ending for unit in self.units for ending in unit.endings})
        gone = []
        for at, side in enumerate(("reference", "target")):
            count = sum(unit.missing[at] for unit in self.units)
            gone += [f"{count} of the {side}"] if count else []
        return found + ([f"files with elements are missing or cut: {', '.join(gone)}"] if gone else [])

    @property
    def answer(self) -> Answer:
        if not self.calls or sum(self.alone) == self.calls:
            return Answer.NOTHING
        cut = any(unit.endings for unit in self.units)
        alone = not cut and self.choice is None and (self.only_reference or self.only_target)
        if alone or any(unit.differs for unit in self.units):
            return Answer.DIFFERS
        return Answer.INCOMPLETE if any(unit.unsure for unit in self.units) else Answer.AGREES

    def stack(self, finding: Finding) -> tuple[Frame, ...]:
        """The Python stack of a finding's call, innermost first; empty where none was recorded."""
        for unit in self.units:
            if (unit.divergence.step, unit.divergence.rank) == (finding.step, finding.rank):
                return unit.stacks.get(finding.comparison.match.call.seq, ())
        return ()
