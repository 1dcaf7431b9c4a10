"""One recorded call, run again on its recorded inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ulpscope.model.errors import CaptureError, ConfigError, did_you_mean
from ulpscope.report.repro import page, script
from ulpscope.store.files.safetensors import write_safetensors

if TYPE_CHECKING:
    from ulpscope.replay.one import OneCall


def rerun(
    run: str | Path,
    call: str,
    *,
    step: int | None = None,
    rank: int | None = None,
    precision: str = "fp64",
    device: str = "cpu",
) -> OneCall:
    """Runs a recorded call again: in its own dtypes, and in better precision rounded at the end. `rows` has what was recorded first.

    `precision` is fp64, fp32, fp16 or bf16. Raises DumpError where there is no such call, or it cannot be run.
    """
    from ulpscope.replay.one import PRECISIONS, replay_call  # brings torch

    if precision not in PRECISIONS:
        near = did_you_mean(precision, PRECISIONS)
        raise ConfigError([f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}.{near}"])
    return replay_call(Path(run), call, step=step, rank=rank, precision=PRECISIONS[precision], device=device)


def repro(
    run: str | Path, call: str, output: str | Path, *, step: int | None = None, rank: int | None = None
) -> tuple[Path, ...]:
    """Writes a new or empty folder with a script that shows what a recorded call did; returns what was written."""
    from ulpscope.replay.one import replay_call, tensors_of  # brings torch

    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"{output} is not an empty folder; choose another one")
    found = replay_call(Path(run), call, step=step, rank=rank)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "repro.py", folder / "tensors.safetensors", folder / "README.md"
    paths[0].write_text(script(found.call, found.repeated.places), encoding="utf-8")
    write_safetensors(paths[1], tensors_of(found))
    text = page(found.call, found.dump.manifest, found.rows, same=found.same)
    paths[2].write_text(text, encoding="utf-8")
    return paths
