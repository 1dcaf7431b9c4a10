"""Recorded calls judged against float64, as text and as JSON."""

from __future__ import annotations

import math
from typing import Any

from ulpscope.replay.results import OpsCheck, OutputResult, WrongCall

_SHOWN = 20


def ops_json(found: OpsCheck) -> dict[str, Any]:
    """The answer with every wrong call, worst first."""
    return {
        "run": found.run,
        "device": found.device,
        "calls": found.calls,
        "judged": found.judged,
        "recorded": found.recorded,
        "made_inputs": found.made_inputs,
        "wrong": [_wrong(each) for each in found.wrong],
        "not_run": found.not_run,
    }


def _wrong(each: WrongCall) -> dict[str, Any]:
    return {
        "step": each.step,
        "rank": each.rank,
        "call": each.name,
        "message": each.message,
        "outputs": [_output(output) for output in each.outputs],
    }


def _output(output: OutputResult) -> dict[str, Any]:
    assert output.explained is not None  # the rule of rounding is the only one here
    error, limit = output.explained.error, output.explained.limit
    return {
        "name": output.name,
        "dtype": output.dtype,
        "error": error if math.isfinite(error) else repr(error),
        "limit": limit,
        "status_of_msprobe": output.judgement.status.value,
    }


def ops_lines(found: OpsCheck) -> list[str]:
    """The answer, the worst calls first."""
    again = found.judged - found.recorded
    how = [f"{found.recorded} as recorded"] if found.recorded else []
    how += [f"{again} run again on {found.device}"] if again else []
    how += [f"{found.made_inputs} with inputs made from statistics"] if found.made_inputs else []
    lines = [f"{found.judged} of {found.calls} calls judged against float64 ({', '.join(how) or 'none'})"]
    wrong = found.wrong
    if wrong:
        lines.append(f"{len(wrong)} wrong: rounding does not explain their error, worst first")
        lines += [f"  step {each.step} rank {each.rank}  {each.name}{_named(each)}" for each in wrong[:_SHOWN]]
        lines += [f"  ... and {len(wrong) - _SHOWN} more; --format json has all"] if len(wrong) > _SHOWN else []
    elif found.judged:
        lines.append("nothing is wrong: rounding explains every error")
    lines += [f"  {count} not run: {reason}" for reason, count in found.not_run.items()]
    return lines


def _named(each: WrongCall) -> str:
    if not each.outputs:
        return f"\n      {each.message}"
    return "".join(
        f"\n      {output.name.removeprefix(each.name + '.')} ({output.dtype}): error {output.explained.error:.3g}, "
        f"rounding explains {output.explained.limit:.3g}"
        for output in each.outputs
        if output.explained is not None
    )
