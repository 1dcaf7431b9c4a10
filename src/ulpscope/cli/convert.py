"""`ulpscope convert SOURCE DEST`: dumps in the format of another tool, and back."""

from __future__ import annotations

import click

from ulpscope.api.converting import FORMATS, convert_kernels, holds_kernels
from ulpscope.api.converting import convert as convert_run
from ulpscope.cli.printing import tell
from ulpscope.model.errors import DumpError
from ulpscope.report.blame import counted
from ulpscope.store.formats.cann_layouts import TARGETS


@click.command()
@click.argument("source", type=click.Path())
@click.argument("dest", type=click.Path())
@click.option(
    "--to",
    "form",
    type=click.Choice(FORMATS),
    help="The format to write.  [default: native, or msprobe for native]",
)
@click.option(
    "--task", type=click.Choice(["statistics", "tensor"]), help="For msprobe.  [default: tensor if it has any]"
)
@click.option(
    "--summary-mode",
    type=click.Choice(["statistics", "md5"]),
    default="statistics",
    show_default=True,
    help="For msprobe: md5 adds the checksums.",
)
@click.option("--layout", type=click.Choice(TARGETS), help="For npy: this layout.  [default: as on the device]")
@click.option("--overwrite", is_flag=True, help="Replace the dumps that lie in DEST.")
def convert(
    source: str,
    dest: str,
    form: str | None,
    task: str | None,
    summary_mode: str,
    layout: str | None,
    overwrite: bool,
) -> None:
    """Write a run in another format: ours for msprobe, or one of msprobe or an older tool for ulpscope.

    \b
    ulpscope convert runs/a dump_path               then: msprobe compare -tp dump_path/... -gp ...
    ulpscope convert dump_path runs/a               then: ulpscope show runs/a
    ulpscope convert kernels arrays --layout NCHW   kernel dumps of CANN to .npy

    SOURCE is a run, or any folder or file in it; every dump in it is written to DEST/step0/rank0, for ptdbg_ascend to
    DEST/step0/ptdbg_dump_v2.0/rank0. A run whose process was killed is written up to its last finished call.
    """
    if form is None and holds_kernels(source):
        done = convert_kernels(source, dest, layout=layout)
        for problem in done.problems:
            tell(f"skipped: {problem}")
        tell(f"wrote {done.arrays} arrays of {counted(done.dumps, 'kernel dump')} to {dest}")
        if done.problems:
            raise DumpError(f"{len(done.problems)} could not be converted, of {source}")
        return
    if layout is not None:
        raise click.UsageError("--layout is for kernel dumps of CANN, which are converted to npy")
    done = convert_run(source, dest, to=form, task=task, summary_mode=summary_mode, overwrite=overwrite)
    for text in done.cut:
        tell(text)
    tell(f"wrote {done.calls} calls of {counted(done.dumps, 'dump')} to {dest}")
    if done.missing:
        raise DumpError(
            f"{done.missing} files with elements that {source} names are missing or cut; the values have their statistics"
        )
