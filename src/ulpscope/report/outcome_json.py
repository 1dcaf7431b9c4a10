"""An outcome as one JSON document: sorted, without times, so that the same data gives the same bytes. docs/compare.md has the schema."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ulpscope.compare.comparison import Comparison
from ulpscope.compare.metrics import METRICS
from ulpscope.findings.advice import Advice
from ulpscope.findings.model import Finding
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Frame, Value
from ulpscope.report.outcome import Outcome

FORMAT = 1


def outcome_json(outcome: Outcome, advice: Advice) -> dict[str, Any]:
    """The whole answer."""
    reference_alone, target_alone = outcome.alone
    return {
        "format": FORMAT,
        "verdict": outcome.answer.text,
        "exit_code": outcome.answer.exit_code,
        "reference": outcome.reference,
        "target": outcome.target,
        "counts": {
            "dumps": len(outcome.units),
            "calls": outcome.calls,
            "matched": outcome.calls - reference_alone - target_alone,
            "only_reference": reference_alone,
            "only_target": target_alone,
            "values": outcome.values,
            "statuses": {status.value: count for status, count in outcome.statuses.items() if count},
            "values_by_verdict": {level.value: count for level, count in outcome.levels.items() if count},
            "values_by_evidence": {evidence.value: count for evidence, count in outcome.evidence.items() if count},
        },
        "first": None if outcome.first is None else finding_json(outcome, outcome.first),
        "suspects": [finding_json(outcome, each) for each in outcome.suspects],
        "spread": list(outcome.origin.sentences),
        "unmatched": [
            {"step": unit.divergence.step, "rank": unit.divergence.rank, "call": name, "why": why}
            for unit in outcome.units
            for name, why in unit.divergence.alone
        ],
        "unknown": [
            {"step": unit.divergence.step, "rank": unit.divergence.rank, "call": name, "why": why}
            for unit in outcome.units
            for name, why in unit.divergence.unknown
        ],
        "remarks": [
            {"step": found.step, "rank": found.rank, "call": name, "what": what}
            for found, (name, what) in outcome.remarks
        ],
        "modules": outcome.modules,
        "only_reference": list(outcome.only_reference),
        "only_target": list(outcome.only_target),
        "incomplete": outcome.lacks,
        "surroundings": [
            {"key": key, "reference": reference, "target": target} for key, reference, target in outcome.differences
        ],
        "artefacts": sorted(path.name for unit in outcome.units for path in unit.artefacts),
        "cause": advice.cause.value,
        "advice": advice.text,
        "next": list(advice.commands),
    }


def finding_json(outcome: Outcome, finding: Finding) -> dict[str, Any]:
    """One call to look at, with its evidence."""
    match = finding.comparison.match
    return {
        "status": finding.status.value,
        "call": call_text(finding.call),
        "reference_call": _reference_call(finding),
        "matched_by": match.how.value,
        "module": finding.where,
        "order": match.call.seq,
        "step": finding.step,
        "rank": finding.rank,
        "input_error": plain(finding.input_error),
        "output_error": plain(finding.output_error),
        "expected": plain(finding.limit),
        "times_expected": plain(finding.weight),
        "why": finding.text,
        "values": [_value_json(each) for each in finding.comparison.values],
        "source": _source_json(outcome.stack(finding)),
        "region": None if finding.beside is None else asdict(finding.beside),
    }


def _reference_call(finding: Finding) -> str | None:
    """The counterpart, or the first call that the reference makes there."""
    reference, beside = finding.comparison.match.reference, finding.beside
    if reference is not None:
        return call_text(reference.id)
    return beside.reference[0].call if beside is not None and beside.reference else None


def _value_json(each: Comparison) -> dict[str, Any]:
    found: dict[str, Any] = {
        "value": slot_text(each.slot),
        "verdict": each.verdict.level.value,
        "why": [code.value for code in each.verdict.codes],
        "text": each.verdict.text,
        "evidence": each.evidence.value,
        "error": plain(each.error),
        "rounding": each.rounding,
        "reference": _side_json(each.reference),
        "target": _side_json(each.target),
    }
    if each.contrast is not None:
        found["metrics"] = {name: plain(metric(each.contrast)) for name, metric in METRICS.items()}
    return found


def _side_json(value: Value | None) -> dict[str, Any] | None:
    if value is None:
        return None
    if not value.is_tensor:
        return {"type": value.type, "value": value.scalar}
    stats = value.stats
    numbers = {} if stats is None else {name: plain(getattr(stats, name)) for name in ("max", "min", "mean", "norm")}
    return {"dtype": value.dtype, "shape": list(value.shape or ()), **numbers}


def _source_json(stack: tuple[Frame, ...]) -> dict[str, Any] | None:
    own = next((frame for frame in stack if not frame.library), stack[0] if stack else None)
    if own is None:
        return None
    return {"file": own.file, "line": own.line, "function": own.function, "text": own.text}


def plain(number: float | int | None) -> Any:
    """RFC 8259 has no NaN and no Infinity: they become texts."""
    return repr(number) if isinstance(number, float) and not math.isfinite(number) else number
