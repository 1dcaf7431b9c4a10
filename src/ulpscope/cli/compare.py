"""`ulpscope compare REFERENCE TARGET`: one clear answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from ulpscope.compare.align import Align
from ulpscope.compare.comparison import CallComparison
from ulpscope.compare.engine import Options, compare_dumps
from ulpscope.compare.mapping import Mapping, read_mapping
from ulpscope.compare.runs import Unit, executor_for, pair_runs
from ulpscope.compare.settings import manifest_differences
from ulpscope.compare.values import Values
from ulpscope.findings.advice import Advice, advise
from ulpscope.findings.divergence import Search
from ulpscope.findings.ranks import explain_later, origin
from ulpscope.model.errors import DumpError
from ulpscope.model.records import CallRecord, Frame
from ulpscope.report.csv import write_csv
from ulpscope.report.outcome import Outcome, UnitOutcome
from ulpscope.report.outcome_json import outcome_json
from ulpscope.report.panel import Page, near, page_of
from ulpscope.report.rows import COLUMNS, rows_of
from ulpscope.report.table import Sheet
from ulpscope.report.xlsx import write_xlsx
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump
from ulpscope.store.run_folder import write_json


@click.command()
@click.argument("reference", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="Folder for what is written.  [default: beside TARGET]")
@click.option("--xlsx", "tables", flag_value="xlsx", help="Write every row to a workbook.")
@click.option("--csv", "tables", flag_value="csv", help="Write every row to a csv file.")
@click.option("--step", type=int, help="Compare this step alone.")
@click.option("--rank", type=int, help="Compare this rank alone.")
@click.option(
    "--align",
    type=click.Choice([each.value for each in Align]),
    default=Align.VALUES.value,
    show_default=True,
    help="Which calls belong together: same place in the same module, same name, or same name without its number.",
)
@click.option(
    "--mapping", type=click.Path(exists=True, dir_okay=False), help="YAML: name in TARGET: name in REFERENCE."
)
@click.option("--no-elements", is_flag=True, help="Do not read the tensors, compare statistics alone.")
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, help="Cores to use.  [default: all]")
@click.option("--format", "form", type=click.Choice(["text", "json", "md", "github", "junit"]), default="text")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 also when the runs differ.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, only write and exit.")
def compare(reference: str, target: str, exit_zero: bool, quiet: bool, form: str, **flags: Any) -> None:
    """Compare two runs and say where they stop agreeing.

    \b
    ulpscope compare runs/a runs/b
    ulpscope compare runs/a/step0/rank3 runs/b/step0/rank3 --xlsx

    REFERENCE and TARGET are runs or any folder or file in one, of ulpscope or of msprobe. Exit code: 0 they agree, 1 they differ,
    3 something could not be read, 4 there is nothing to compare.
    """
    outcome, folder = compared(reference, target, quiet=quiet, **flags)
    advice = _advice(outcome)
    document = outcome_json(outcome, advice)
    written = _write(folder, document)
    if not quiet:
        _print(outcome, document, advice, form, written)
    sys.exit(0 if exit_zero else outcome.answer.exit_code)


def compared(
    reference: str,
    target: str,
    *,
    quiet: bool = True,
    output: str | None = None,
    tables: str | None = None,
    step: int | None = None,
    rank: int | None = None,
    align: str = Align.VALUES.value,
    mapping: str | None = None,
    no_elements: bool = False,
    jobs: int = 0,
) -> tuple[Outcome, Path]:
    """What two runs came to, and the folder for what is written about them."""
    runs = pair_runs(reference, target, step=step, rank=rank)
    folder = Path(output) if output else _beside(Path(reference), Path(target))
    jobs = jobs or os.cpu_count() or 1
    apart = len(runs.units) > 1 and jobs > 1
    options = Options(
        Align(align),
        read_mapping(mapping) if mapping else Mapping(),
        jobs=1 if apart else jobs,
        elements=not no_elements,
    )
    progress = sys.stderr.isatty() and not quiet
    work = partial(compare_unit, Task(options, tables, folder, progress and not apart))
    executor = executor_for(len(runs.units), jobs)
    try:
        found = tuple(executor.gather(executor.map(work, runs.units)))
    finally:
        executor.close()
    outcome = Outcome(
        reference,
        target,
        found,
        tuple(f"step {place.step} rank {place.rank}" for place in runs.only_reference),
        tuple(f"step {place.step} rank {place.rank}" for place in runs.only_target),
        origin(explain_later(unit.divergence for unit in found)),
    )
    return outcome, folder


@dataclass(frozen=True, slots=True)
class Task:
    """What is done with every unit."""

    options: Options
    tables: str | None
    folder: Path
    progress: bool


def compare_unit(task: Task, unit: Unit) -> UnitOutcome:
    """One step of one rank: its table if asked, and what was found."""
    reference, target = open_dump(unit.reference), open_dump(unit.target)
    values = Values(reference, target)
    search = Search(unit.step, unit.rank, values)
    stream = _seen(compare_dumps(reference, target, task.options, values), search)
    if task.progress:
        stream = _with_progress(stream, max(len(reference), len(target)))
    artefacts = []
    if task.tables:
        path = task.folder / f"compare_step{unit.step}_rank{unit.rank}.{task.tables}"
        if task.tables == "xlsx":
            write_xlsx(path, [Sheet("values", list(COLUMNS), rows_of(stream))])
        else:
            write_csv(path, list(COLUMNS), rows_of(stream))
        artefacts.append(path)
    for _ in stream:
        pass
    divergence = search.result()
    stacks = {}
    for finding in divergence.findings:
        match = finding.comparison.match
        dump = reference if match.target is None else target
        stacks[match.call.seq] = _stack(dump, match.call)
    endings = [f"{dump.folder}: {dump.ending}" for dump in (reference, target) if dump.ending != "complete"]
    endings += _other_calls(reference, target)
    missing = (len(reference.missing), len(target.missing)) if task.options.elements else (0, 0)
    surroundings = tuple(manifest_differences(reference.manifest, target.manifest))
    return UnitOutcome(divergence, stacks, tuple(endings), surroundings, tuple(artefacts), missing)


def _stack(dump: Dump, call: CallRecord) -> tuple[Frame, ...]:
    try:
        return tuple(dump.stack(call))
    except DumpError as error:
        click.echo(f"ulpscope: {error}; it is left out", err=True)  # the answer does without
        return ()


def _seen(calls: Iterator[CallComparison], search: Search) -> Iterator[CallComparison]:
    for call in calls:
        search.see(call)
        yield call


def _with_progress(calls: Iterator[CallComparison], total: int) -> Iterator[CallComparison]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("comparing", total=total)
        for number, call in enumerate(calls):
            if number % 64 == 0:
                bar.update(task, completed=number)
            yield call


def _other_calls(reference: Dump, target: Dump) -> Iterator[str]:
    """Why one of two dumps of the same program may have calls that the other lacks."""
    left, right = reference.manifest.config, target.manifest.config
    for key in ("level", "only", "skip", "scope", "phases"):
        if key in left and key in right and left[key] != right[key]:
            yield f"recorded with other options, {key} {left[key]} and {right[key]}: calls that only one has are left out"


def _beside(reference: Path, target: Path) -> Path:
    names = [path.resolve().name for path in (target, reference)]
    return target.resolve().parent / f"{names[0]}.vs.{names[1]}"


def _write(folder: Path, document: dict[str, Any]) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "result.json", document)
    except OSError as error:
        click.echo(
            f"ulpscope: cannot write {folder / 'result.json'}: {error.strerror}; -o chooses another folder", err=True
        )
        return None
    return folder / "result.json"


def _advice(outcome: Outcome) -> Advice:
    several = len(outcome.units) > 1
    alone = None
    for unit in reversed(outcome.units):
        for name, why in unit.divergence.alone[:1]:
            run = outcome.target if why.startswith("the reference") else outcome.reference
            alone = (f"{run} --step {unit.divergence.step} --rank {unit.divergence.rank}" if several else run), name
    return advise(outcome.first, reference=outcome.reference, target=outcome.target, several=several, alone=alone)


# --- what is printed --------------------------------------------------------------------------------------------


def _print(outcome: Outcome, document: dict[str, Any], advice: Advice, form: str, written: Path | None) -> None:
    if form == "json":
        click.echo(json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False))
        return
    page = page_of(outcome, advice)
    if form == "text":
        _print_page(page)
        if written is not None:
            click.echo(f"written    {near(written)}")
        return
    from ulpscope.report.forms import FORMS

    click.echo("\n".join(FORMS[form](outcome, page)))


def _print_page(page: Page) -> None:
    if not sys.stdout.isatty():
        click.echo("\n".join(page.lines()))
        return
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False)

    def text(line: Any) -> Text:
        return Text.assemble(*((piece.text, piece.style) for piece in line))

    for line in page.head:
        console.print(text(line), soft_wrap=True)
    if page.box:
        box = Group(*(text(line) for line in page.box))
        console.print(
            Panel(box, title=Text(page.title, f"bold {page.style}"), title_align="left", border_style=page.style)
        )
    else:
        console.print(Text(page.title, f"bold {page.style}"))
    for line in page.tail:
        console.print(text(line), soft_wrap=True)
