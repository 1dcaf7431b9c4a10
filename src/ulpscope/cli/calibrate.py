"""`ulpscope calibrate`: what the kernels of this device and build do in right programs, for the limits of `blame`."""

from __future__ import annotations

from pathlib import Path

import click

from ulpscope.analyze.calibrate import kept, table_of, unusual
from ulpscope.analyze.measured import own_path, shipped, write_table

_SECONDS = 30.0
_MOST = 20


@click.command()
@click.option("--device", default="cpu", show_default=True, help="What to measure: cpu, cuda, cuda:1 ...")
@click.option("--seconds", default=_SECONDS, show_default=True, help="How long; once through all programs at least.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the table here instead of where blame reads it."
)
def calibrate(device: str, seconds: float, output: Path | None) -> None:
    """Measure what the kernels of this device and this build of torch do, and say what is unusual.

    Small right programs are run forward and backward in float32, bfloat16 and float16, every kernel beside itself in float64.
    The largest errors go into a small table that `blame` reads beside the one that ships; ULPSCOPE_KERNELS says where, if not
    in the folder for caches. A kernel that does worse than a tensor core or a quick function explains is named, and its limit
    is not widened. Exit code: 0 all is as elsewhere or explained, 1 a kernel is worse than that, 2 usage or no such device.
    """
    from ulpscope.replay.calibrate import measured_rows, where  # brings torch

    found = table_of(measured_rows(device, seconds))
    path = output or own_path()
    table = kept(found)
    write_table(path, table, where(device))
    calls = sum(kernel.calls for kernel in found.values())
    click.echo(f"{calls} results of {len({key[0] for key in found})} kernels on {device}: {path}")
    odd = list(unusual(found, shipped()))
    for (name, dtype, _, place), text in odd[:_MOST]:
        click.echo(f"  unusual  {name} {dtype}" + (", results after the first" if place else "") + f": {text}")
    if len(odd) > _MOST:
        click.echo(f"  and {len(odd) - _MOST} more")
    worse = sorted({key[0] for key, kernel in found.items() if table[key] != kernel})
    if worse:
        click.echo(f"worse than any right kernel: {', '.join(worse)}; look at them with `ulpscope blame`")
    raise SystemExit(1 if worse else 0)
