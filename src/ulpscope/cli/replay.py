"""`ulpscope replay RUN CALL`: one recorded call, run again on its recorded inputs."""

from __future__ import annotations

import sys

import click

from ulpscope.analyze.ledger import judge
from ulpscope.api.rerunning import rerun
from ulpscope.cli.printing import print_json, print_lines
from ulpscope.report.replay import replay_json, replay_lines

_PRECISIONS = ["fp64", "fp32", "fp16", "bf16"]


@click.command()
@click.argument("run", type=click.Path())
@click.argument("call", metavar="CALL")
@click.option("--as", "precision", type=click.Choice(_PRECISIONS), default="fp64", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Where it is run again: cpu, cuda, cuda:1.")
@click.option("--step", type=int, help="The step of the call.  [default: the first]")
@click.option("--rank", type=int, help="The rank of the call.  [default: the first]")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--exit-zero", is_flag=True, help="Exit with 0 also when the call is wrong.")
def replay(
    run: str, call: str, precision: str, device: str, step: int | None, rank: int | None, form: str, exit_zero: bool
) -> None:
    """Run one recorded call again on its recorded inputs, and judge what was recorded.

    \b
    ulpscope replay runs/a Aten.addmm.default.3.forward
    ulpscope replay runs/a Functional.linear.3.forward --device cuda --as fp32

    CALL is a kernel or a call of the API, forward, recorded with --tensors; `ulpscope show RUN` lists them. Shown against
    float64: what was recorded, the call run again in its own dtypes, and run in better precision and rounded at the end.
    Exit code: 0 rounding explains what was recorded, 1 it does not, 3 it cannot be run again.
    """
    found = rerun(run, call, step=step, rank=rank, precision=precision, device=device)
    if form == "json":
        print_json(replay_json(found.name, found.rows, same=found.same), default=str)
    else:
        print_lines(replay_lines(found.name, found.rows, same=found.same))
    recorded = next(iter(found.rows.values()))
    sys.exit(1 if judge([recorded]).first is not None and not exit_zero else 0)
