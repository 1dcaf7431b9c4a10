"""`ulpscope check ops RUN`: every recorded call run again in float64, and what the run or a device made of it beside it."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ulpscope.model.errors import ConfigError, DumpError
from ulpscope.replay.results import CallResult, OutputResult
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_run

if TYPE_CHECKING:
    from ulpscope.replay.precheck import Plan

_NOTHING = 4
_SHOWN = 20


@click.command(options_metavar="[OPTIONS]")
@click.argument("run", type=click.Path(exists=True))
@click.option(
    "--device", help="Run the calls again on this device (cpu, cuda, npu:1) instead of judging what was recorded."
)
@click.option("--only", multiple=True, metavar="OP", help="Only this operator, such as conv2d; may be repeated.")
@click.option("--skip", multiple=True, metavar="OP", help="Not this operator; may be repeated.")
@click.option("--once", is_flag=True, help="Of calls with the same kinds of arguments, only the first.")
@click.option("-n", "--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Work in parallel.")
@click.option("--seed", type=int, default=1234, show_default=True, help="For inputs made from statistics.")
@click.option(
    "--save-errors", type=click.Path(), help="Keep inputs and outputs of what is wrong in this folder, as .pt."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--exit-zero", is_flag=True, help="Exit with 0 also when a call is wrong.")
def ops(
    run: str,
    device: str | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    once: bool,
    processes: int,
    seed: int,
    save_errors: str | None,
    form: str,
    exit_zero: bool,
) -> None:
    """Run every recorded API call again in float64 on the CPU, forward and backward.

    \b
    ulpscope check ops runs/a                  what was recorded, beside float64 (capture with --tensors)
    ulpscope check ops runs/a --device cuda    what the device makes of the same inputs
    ulpscope check ops dump_path/step0/rank0   a dump of msprobe

    A run without tensors gets inputs made from its statistics, and is run again. A call is wrong where rounding does not
    explain its error. Exit code: 0 nothing is wrong, 1 a call is wrong, 3 files with elements are missing or cut, 4 nothing could be run.
    """
    from ulpscope.frameworks.torch.api_arguments import is_known  # brings torch
    from ulpscope.frameworks.torch.api_runner import ApiRunner, default_device
    from ulpscope.replay.precheck import Choice, Plan

    wrong = [f"torch has no operator {name!r}" for name in (*only, *skip) if not is_known(name)]
    if wrong:
        raise ConfigError(wrong)
    dumps = open_run(run)
    if not dumps:
        raise DumpError(f"{run} holds no dump; `ulpscope capture --tensors -o {run} -- CMD` makes one")
    runner = ApiRunner(device or default_device(), seed=seed, recorded=device is None)
    errors = None if save_errors is None else Path(save_errors)
    plan = Plan(runner, Choice(frozenset(only), frozenset(skip), once), error_data=errors)
    found = [(dump, result) for dump in dumps for result in _results(dump, plan, processes)]
    content = _content(run, runner.device, found)
    if form == "json":
        click.echo(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False))
    else:
        click.echo("\n".join(_lines(content)))
    if content["wrong"]:
        sys.exit(0 if exit_zero else 1)
    missing = sum(_missing(dump) for dump in dumps)
    if missing:
        raise DumpError(
            f"{missing} files with elements that {run} names are missing or cut; their calls were not judged"
        )
    sys.exit(0 if content["judged"] else _NOTHING)


def _missing(dump: Dump) -> int:
    """How many files are; a dump tells when it has been read, which other processes may have done."""
    deque(dump.calls(), maxlen=0)
    return len(dump.missing)


def _results(dump: Dump, plan: Plan, processes: int) -> list[CallResult]:
    from ulpscope.replay.precheck import check_dump, check_in_processes

    if processes > 1:
        return list(check_in_processes(dump.folder, plan, processes=processes))
    return list(check_dump(dump, plan))


def _content(run: str, device: str, found: list[tuple[Dump, CallResult]]) -> dict[str, Any]:
    wrong, skipped = [], Counter[str]()
    judged = recorded = made = 0
    for dump, result in found:
        place = {"step": dump.manifest.step, "rank": dump.manifest.rank, "call": result.name}
        judged += bool(result.outputs)
        recorded += any(output.recorded for output in result.outputs)
        made += bool(result.outputs) and not result.real
        if not result.outputs or "not run again" in result.message:
            skipped[result.message.partition("not run again: ")[2] or result.message] += 1
        if result.status.value == "error":
            wrong.append({**place, "message": result.message, "outputs": _outputs(result)})
    return {
        "run": run,
        "device": device,
        "calls": len(found),
        "judged": judged,
        "recorded": recorded,
        "made_inputs": made,
        "wrong": sorted(wrong, key=lambda each: -_excess(each)),
        "not_run": dict(skipped.most_common()),
    }


def _outputs(result: CallResult) -> list[dict[str, Any]]:
    return [_output(output) for output in result.outputs if output.status.value == "error"]


def _output(output: OutputResult) -> dict[str, Any]:
    assert output.explained is not None
    error, limit = output.explained.error, output.explained.limit
    return {
        "name": output.name,
        "dtype": output.dtype,
        "error": error if math.isfinite(error) else repr(error),
        "limit": limit,
        "status_of_msprobe": output.judgement.status.value,
    }


def _excess(each: dict[str, Any]) -> float:
    ratios = [
        math.inf if isinstance(output["error"], str) or not output["limit"] else output["error"] / output["limit"]
        for output in each["outputs"]
    ]
    return max(ratios, default=math.inf)


def _lines(content: dict[str, Any]) -> list[str]:
    rerun = content["judged"] - content["recorded"]
    how = [f"{content['recorded']} as recorded"] if content["recorded"] else []
    how += [f"{rerun} run again on {content['device']}"] if rerun else []
    how += [f"{content['made_inputs']} with inputs made from statistics"] if content["made_inputs"] else []
    lines = [f"{content['judged']} of {content['calls']} calls judged against float64 ({', '.join(how) or 'none'})"]
    wrong = content["wrong"]
    if wrong:
        lines.append(f"{len(wrong)} wrong: rounding does not explain their error, worst first")
        lines += [
            f"  step {each['step']} rank {each['rank']}  {each['call']}" + _named(each) for each in wrong[:_SHOWN]
        ]
        lines += [f"  ... and {len(wrong) - _SHOWN} more; --format json has all"] if len(wrong) > _SHOWN else []
    elif content["judged"]:
        lines.append("nothing is wrong: rounding explains every error")
    for reason, count in content["not_run"].items():
        lines.append(f"  {count} not run: {reason}")
    return lines


def _named(each: dict[str, Any]) -> str:
    if not each["outputs"]:
        return f"\n      {each['message']}"
    return "".join(
        f"\n      {output['name'].removeprefix(each['call'] + '.')} ({output['dtype']}): error {_short(output['error'])}, "
        f"rounding explains {_short(output['limit'])}"
        for output in each["outputs"]
    )


def _short(number: float | str) -> str:
    return number if isinstance(number, str) else f"{number:.3g}"
