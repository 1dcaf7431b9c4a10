"""`ulpscope show RUN [NAME]`: what was recorded."""

from __future__ import annotations

from pathlib import Path

import click

from ulpscope.cli.printing import print_json, print_lines
from ulpscope.model.errors import DumpError, did_you_mean
from ulpscope.model.names import call_text, is_within
from ulpscope.model.records import CallId, CallRecord
from ulpscope.report.json import call_json, run_json
from ulpscope.report.text import call_line, call_lines, run_lines
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_run


@click.command()
@click.argument("run", type=click.Path())
@click.argument("name", required=False)
@click.option("--step", type=int, help="Look at this step.  [default: the first]")
@click.option("--rank", type=int, help="Look at this rank.  [default: the first]")
@click.option("--phase", type=click.Choice(["forward", "backward", "parameters_grad", "step", "debug"]))
@click.option(
    "-n", "--limit", type=click.IntRange(0), default=200, show_default=True, help="At most so many calls; 0: all."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def show(
    run: str, name: str | None, step: int | None, rank: int | None, phase: str | None, limit: int, form: str
) -> None:
    """What was recorded.

    RUN is a run folder or any folder or file in it. Without NAME: the dumps of the run and the calls of one. NAME is a call
    (Functional.linear.0.forward): shown with its values and stack; or part of a name, or a module: lists what matches.
    """
    dumps = [
        dump
        for dump in open_run(Path(run))
        if step in (None, dump.manifest.step) and rank in (None, dump.manifest.rank)
    ]
    if not dumps:
        raise DumpError(f"{run} holds no dump for the asked step and rank; a dump is a folder step0/rank0")
    dump = dumps[0]
    found = [dump.nth(row) for row, call in enumerate(dump.ids()) if call_text(call) == name]
    if found and form == "json":
        print_json({"calls": [call_json(dump, call, stack=True) for call in found]})
    elif found:
        for call in found:
            print_lines(call_lines(dump, call))
    else:
        _show_some(dumps, name, phase, limit, form)


def _show_some(dumps: list[Dump], name: str | None, phase: str | None, limit: int, form: str) -> None:
    dump = dumps[0]
    ids = dump.ids()
    rows = [row for row, call in enumerate(ids) if phase in (None, call.phase.value)]
    if name is not None:
        modules = dump.modules()
        rows = [row for row in rows if _matches(name, ids[row], modules[row])]
        if not rows:
            raise DumpError(f"no call in {dump.folder} matches {name!r}.{did_you_mean(name, map(call_text, ids))}")
    shown = [dump.nth(row) for row in (rows[:limit] if limit else rows)]
    if form == "json":
        print_json({**run_json(dumps), "calls": [call_json(dump, call, stack=False) for call in shown]})
    else:
        _print_text(dumps, dump, shown, len(rows), brief=name is not None)


def _matches(name: str, call: CallId, module: str) -> bool:
    return name.lower() in call_text(call).lower() or is_within(module, name)


def _print_text(dumps: list[Dump], dump: Dump, shown: list[CallRecord], total: int, *, brief: bool) -> None:
    if not brief:
        click.echo("\n".join(run_lines(dumps)) + "\n")
        for note in dump.manifest.notes:
            click.echo(f"note: {note}")
    for call in shown:
        click.echo(call_line(call))
    if len(shown) < total:
        click.echo(f"... {total - len(shown)} more (--limit 0 shows all)")
    if shown and not brief:
        click.echo(f"\nnext    ulpscope show {dump.folder} {call_text(shown[len(shown) // 2].id)}")
