"""`ulpscope tensor A [B]`: one tensor, two tensors element by element, or two folders of them."""

from __future__ import annotations

from pathlib import Path

import click

from ulpscope.api.launch import NOTHING
from ulpscope.cli.printing import print_json, print_lines
from ulpscope.compare.elements import BY, Elements, survey
from ulpscope.compare.kernels import TensorPair, compare_folders
from ulpscope.compare.metrics import contrast_bits
from ulpscope.model.errors import DumpError
from ulpscope.report.csv import write_csv
from ulpscope.report.kernels import COLUMNS, kernel_rows
from ulpscope.report.tensor import (
    folder_lines,
    pair_json,
    pair_lines,
    pairs_lines,
    save_text,
    tensor_json,
    tensor_lines,
)
from ulpscope.store.tensor_file import StoredTensor, read_tensor
from ulpscope.store.tensor_folder import holds_tensors, read_folder

_DIFFERS = 1


@click.command()
@click.argument("reference", metavar="A")
@click.argument("target", metavar="[B]", required=False)
@click.option("-n", "--worst", type=click.IntRange(0, 10000), default=10, show_default=True, help="So many elements.")
@click.option("--by", type=click.Choice(BY), default="abs", show_default=True, help="What makes an element the worst.")
@click.option("--atol", type=click.FloatRange(0), default=0.0, show_default=True, help="Tolerated: atol + rtol * |A|.")
@click.option("--rtol", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--step", type=int, help="The step of a run.  [default: the first]")
@click.option("--rank", type=int, help="The rank of a run.  [default: the first]")
@click.option("--text", "text_file", type=click.Path(), help="Write the elements of A as text to this file.")
@click.option("--csv", "csv_file", type=click.Path(), help="For two folders: write a table of all pairs.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def tensor(
    ctx: click.Context,
    reference: str,
    target: str | None,
    worst: int,
    by: str,
    atol: float,
    rtol: float,
    step: int | None,
    rank: int | None,
    text_file: str | None,
    csv_file: str | None,
    form: str,
) -> None:
    """One tensor, or how B differs from A: the worst elements, how errors are distributed, and where they sit.

    \b
    ulpscope tensor a.npy                      a .npy or .pt file
    ulpscope tensor a.pt b.pt
    ulpscope tensor runs/a::Functional.linear.0.forward.output.0 runs/b::Functional.linear.0.forward.output.0
    ulpscope tensor Add.add_1.24.5.1636595794631347::output.0          a kernel dump of CANN
    ulpscope tensor kernels/a kernels/b        two folders of kernel dumps, .npy or .pt files

    Exit code 1 when an element differs by more than atol + rtol * |A|.
    """
    folders = [each is not None and holds_tensors(Path(each)) for each in (reference, target)]
    if folders[0] and (target is None or folders[1]):
        if target is None:
            print_lines(folder_lines(read_folder(Path(reference))))
            return
        ctx.exit(_folders(reference, target, csv_file))
    if csv_file is not None:
        raise click.UsageError("--csv is for two folders of tensors", ctx)
    first = read_tensor(reference, step=step, rank=rank)
    if text_file is not None:
        save_text(first, Path(text_file))
    if target is None:
        if form == "json":
            print_json(tensor_json(first))
        else:
            print_lines(tensor_lines(first))
        return
    second = read_tensor(target, step=step, rank=rank)
    ctx.exit(_pair(first, second, worst=worst, by=by, atol=atol, rtol=rtol, form=form))


def _pair(
    reference: StoredTensor, target: StoredTensor, *, worst: int, by: str, atol: float, rtol: float, form: str
) -> int:
    if reference.count != target.count:
        raise DumpError(
            f"{reference.source} has shape {reference.shape}, {target.source} has {target.shape}: "
            f"{reference.count} and {target.count} elements cannot be paired"
        )
    contrast = contrast_bits(reference.raw, reference.dtype, target.raw, target.dtype)
    sides = [Elements(side.raw, side.dtype, side.shape) for side in (reference, target)]
    found = survey(*sides, atol=atol, rtol=rtol, worst=worst, by=by)
    if form == "json":
        print_json(pair_json(reference, target, contrast, found))
    else:
        print_lines(pair_lines(reference, target, contrast, found, by=by))
    return NOTHING if not contrast.count else _DIFFERS if found.off else 0


def _folders(reference: str, target: str, csv_file: str | None) -> int:
    folders = read_folder(Path(reference)), read_folder(Path(target))
    pairs: list[TensorPair] = list(compare_folders(*folders))
    if csv_file is not None:
        write_csv(Path(csv_file), COLUMNS, kernel_rows(pairs))
    print_lines(pairs_lines(reference, target, pairs))
    measured = [pair.measured.contrast for pair in pairs if pair.measured is not None]
    if not measured:
        return NOTHING
    if any(contrast.differing for contrast in measured):
        return _DIFFERS
    return DumpError.exit_code if len(measured) < len(pairs) else 0
