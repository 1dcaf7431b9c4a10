"""`ulpscope check ops RUN`: every recorded call run again in float64, and what the run or a device made of it beside it."""

from __future__ import annotations

import sys

import click

from ulpscope.api.checks import check_ops
from ulpscope.cli.printing import print_json, print_lines
from ulpscope.model.errors import DumpError
from ulpscope.report.ops import ops_json, ops_lines


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
    found = check_ops(
        run,
        device=device,
        only=only,
        skip=skip,
        once=once,
        processes=processes,
        seed=seed,
        save_errors=save_errors,
    )
    if form == "json":
        print_json(ops_json(found))
    else:
        print_lines(ops_lines(found))
    if found.missing:
        raise DumpError(
            f"{found.missing} files with elements that {run} names are missing or cut; their calls were not judged"
        )
    sys.exit(0 if found.wrong and exit_zero else found.exit_code)
