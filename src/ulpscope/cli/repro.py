"""`ulpscope repro RUN CALL -o FOLDER`: a bug report about one recorded call."""

from __future__ import annotations

from pathlib import Path

import click

from ulpscope.model.errors import CaptureError
from ulpscope.report.repro import page, script
from ulpscope.store.files.safetensors import write_safetensors


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
    from ulpscope.replay.one import replay_call, tensors_of  # brings torch

    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"{output} is not an empty folder; choose another one")
    found = replay_call(Path(run), call, step=step, rank=rank)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "tensors.safetensors", tensors_of(found))
    (folder / "repro.py").write_text(script(found.call, found.repeated.places), encoding="utf-8")
    text = page(found.call, found.dump.manifest, found.rows, same=found.same)
    (folder / "README.md").write_text(text, encoding="utf-8")
    click.echo(f"{folder}: repro.py, tensors.safetensors, README.md")
