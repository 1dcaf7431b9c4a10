"""`ulpscope repro RUN CALL -o FOLDER`: a bug report about one recorded call."""

from __future__ import annotations

import click

from ulpscope.api.rerunning import repro as write_repro


@click.command()
@click.argument("run", type=click.Path())
@click.argument("call", metavar="CALL")
@click.option("-o", "--output", type=click.Path(), required=True, help="A new or empty folder.")
@click.option("--step", type=int, help="The step of the call.  [default: the first]")
@click.option("--rank", type=int, help="The rank of the call.  [default: the first]")
def repro(run: str, call: str, output: str, step: int | None, rank: int | None) -> None:
    """Write a folder with everything that shows what one recorded call did.

    \b
    ulpscope repro runs/a Aten.addmm.default.3.forward -o addmm
    python addmm/repro.py

    repro.py needs torch alone: it runs the call on every device that is there and in float64, and prints the errors.
    tensors.safetensors has the inputs, the recorded results and those in float64; README.md says what is wrong, and with
    which versions.
    """
    written = write_repro(run, call, output, step=step, rank=rank)
    click.echo(f"{output}: {', '.join(path.name for path in written)}")
