"""`ulpscope convert SOURCE DEST`: dumps in the format of another tool, and back."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from ulpscope.model.errors import CaptureError, DumpError
from ulpscope.store.convert import write_native
from ulpscope.store.dump import Dump
from ulpscope.store.formats.cann import kernel_files, kernel_name
from ulpscope.store.formats.cann_layouts import TARGETS
from ulpscope.store.formats.cann_npy import convert_kernel, kernel_dumps_at
from ulpscope.store.formats.msprobe_writer import LEVEL_NAMES, write_msprobe
from ulpscope.store.formats.ptdbg_writer import ptdbg_folder, write_ptdbg
from ulpscope.store.registry import find_dumps, find_folders, open_dump
from ulpscope.store.run_folder import dump_folder


@click.command()
@click.argument("source", type=click.Path())
@click.argument("dest", type=click.Path())
@click.option(
    "--to",
    "form",
    type=click.Choice(["msprobe", "native", "ptdbg"]),
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
    if form == "npy" or (form is None and _holds_kernels(Path(source))):
        _convert_kernels(Path(source), Path(dest), layout)
        return
    if layout is not None:
        raise click.UsageError("--layout is for kernel dumps of CANN, which are converted to npy")
    places = find_dumps(Path(source))
    if not places:
        raise DumpError(f"{source} holds no dump; a dump is a folder step0/rank0")
    _clear(Path(dest), Path(source), overwrite)
    done = missing = 0
    for place in places:
        dump = open_dump(place.folder)
        folder = dump_folder(Path(dest), place.step, place.rank, place.copy)
        to = form or ("msprobe" if dump.source.format == "native" else "native")
        if to == "native":
            write_native(dump, folder)
        elif to == "ptdbg":
            write_ptdbg(dump, ptdbg_folder(Path(dest), step=place.step, rank=place.rank), mode="api_stack")
        else:
            level = LEVEL_NAMES.get(dump.manifest.level, dump.manifest.level)
            write_msprobe(dump, folder, task=task or _task_of(dump), level=level, summary_mode=summary_mode)
        done += len(dump)
        missing += len(dump.missing)
        if dump.ending != "complete":
            click.echo(f"ulpscope: {place.folder}: {dump.ending}", err=True)
    plural = "s"[: len(places) > 1]
    click.echo(f"ulpscope: wrote {done} calls of {len(places)} dump{plural} to {dest}", err=True)
    if missing:
        raise DumpError(
            f"{missing} files with elements that {source} names are missing or cut; the values have their statistics"
        )


def _holds_kernels(source: Path) -> bool:
    return bool(kernel_files(source)) if source.is_dir() else kernel_name(source) is not None


def _convert_kernels(source: Path, dest: Path, layout: str | None) -> None:
    """Arrays of the same names are replaced, other files in DEST stay."""
    files = kernel_dumps_at(source)
    dest.mkdir(parents=True, exist_ok=True)
    converted = [convert_kernel(path, dest, layout=layout) for path in files]
    problems = [problem for each in converted for problem in each.problems]
    for problem in problems:
        click.echo(f"ulpscope: skipped: {problem}", err=True)
    written = sum(len(each.written) for each in converted)
    click.echo(
        f"ulpscope: wrote {written} arrays of {len(files)} kernel dump{'s'[: len(files) > 1]} to {dest}", err=True
    )
    if problems:
        raise DumpError(f"{len(problems)} could not be converted, of {source}")


def _task_of(dump: Dump) -> str:
    stored = any(value.payload is not None for call in dump.calls() for value in call.values)
    return "tensor" if stored else "statistics"


def _clear(dest: Path, source: Path, overwrite: bool) -> None:
    if dest.exists() and not dest.is_dir():
        raise CaptureError(f"{dest} is a file; DEST needs a folder")
    if not dest.exists() or not any(dest.iterdir()):
        return
    if not overwrite:
        raise CaptureError(f"{dest} is not empty; choose another folder, or add --overwrite to replace the dumps in it")
    inside, outside = dest.resolve(), source.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise CaptureError(f"{source} and {dest} lie in each other; choose another folder")
    # Only dumps go: whatever else lies in the folder stays.
    for place in find_folders(dest):
        shutil.rmtree(place.folder)
