"""`ulpscope compare REFERENCE TARGET`: one clear answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ulpscope.api.comparing import advice_on, result_folder
from ulpscope.api.comparing import compare as compare_runs
from ulpscope.cli.printing import print_json, print_lines, tell
from ulpscope.compare.align import Align
from ulpscope.compare.comparison import CallComparison
from ulpscope.findings.advice import Advice
from ulpscope.report.outcome import Outcome
from ulpscope.report.outcome_json import outcome_json
from ulpscope.report.panel import Page, near, page_of
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
    help="Which calls belong together: by place and by the values they read, same name, or same name without its number.",
)
@click.option(
    "--mapping", type=click.Path(exists=True, dir_okay=False), help="YAML: name in TARGET: name in REFERENCE."
)
@click.option("--no-elements", is_flag=True, help="Do not read the tensors, compare statistics alone.")
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, help="Cores to use.  [default: all]")
@click.option("--format", "form", type=click.Choice(["text", "json", "md", "github", "junit"]), default="text")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 also when the runs differ.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, only write and exit.")
def compare(
    reference: str, target: str, output: str | None, exit_zero: bool, quiet: bool, form: str, **flags: Any
) -> None:
    """Compare two runs and say where they stop agreeing.

    \b
    ulpscope compare runs/a runs/b
    ulpscope compare runs/a/step0/rank3 runs/b/step0/rank3 --xlsx

    REFERENCE and TARGET are runs or any folder or file in one, of ulpscope or of msprobe. Exit code: 0 they agree, 1 they differ,
    3 something could not be read, 4 there is nothing to compare.
    """
    watched = None if quiet or not sys.stderr.isatty() else _with_progress
    elements = not flags.pop("no_elements")
    outcome = compare_runs(reference, target, elements=elements, progress=watched, output=output, **flags)
    advice = advice_on(outcome)
    document = outcome_json(outcome, advice)
    written = _write(result_folder(reference, target, output), document)
    if not quiet:
        _print(outcome, document, advice, form, written)
    sys.exit(0 if exit_zero else outcome.answer.exit_code)


def _with_progress(calls: Iterator[CallComparison], total: int) -> Iterator[CallComparison]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("comparing", total=total)
        for number, call in enumerate(calls):
            if number % 64 == 0:
                bar.update(task, completed=number)
            yield call


def _write(folder: Path, document: dict[str, Any]) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "result.json", document)
    except OSError as error:
        tell(f"cannot write {folder / 'result.json'}: {error.strerror}; -o chooses another folder")
        return None
    return folder / "result.json"


def _print(outcome: Outcome, document: dict[str, Any], advice: Advice, form: str, written: Path | None) -> None:
    if form == "json":
        print_json(document)
        return
    page = page_of(outcome, advice)
    if form == "text":
        _print_page(page)
        if written is not None:
            click.echo(f"written    {near(written)}")
        return
    from ulpscope.report.forms import FORMS

    print_lines(FORMS[form](outcome, page))


def _print_page(page: Page) -> None:
    if not sys.stdout.isatty():
        print_lines(page.lines())
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
