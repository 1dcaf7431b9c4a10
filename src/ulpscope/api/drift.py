"""Bug or chaos: how far runs of a program drift apart by themselves, and where another run stands among them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ulpscope.analyze.chaos import FEWEST, Origin, Placement, place
from ulpscope.api.launch import CUT, NOTHING, ending, launch
from ulpscope.model.errors import CaptureError, ConfigError, DumpError
from ulpscope.replay.drift_watch import DRIFT_VARIABLE
from ulpscope.store.loss_curve import read_tracks


@dataclass(frozen=True, slots=True)
class Chaos:
    """How runs drift, and where the observed one stands; None where no model was seen to run. `ended`: how each command did."""

    placement: Placement | None
    ended: tuple[int, ...]

    @property
    def exit_code(self) -> int:
        if self.placement is None or not self.placement.drifts:
            return NOTHING
        return 1 if self.placement.origin is Origin.BUG else CUT if any(self.ended) else 0


def chaos(
    command: Sequence[str], *, learned: str | Path | None = None, output: str | Path | None = None, runs: int = 8
) -> Chaos:
    """Learns how far runs of a command drift apart: the reference, and `runs` nudged by one ulp, kept in `output`. With what was
    `learned` earlier the command is run once, and placed among them. Raises DumpError where too few runs were seen."""
    if learned is not None and output is not None:
        raise ConfigError(["output is for learning; what was learned is only read"])
    known = {} if learned is None else read_tracks(Path(learned))
    with tempfile.TemporaryDirectory(prefix="ulpscope-chaos-") as scratch:
        folder = Path(output or scratch).resolve()
        if folder.exists() and any(folder.glob("track.*")):
            raise CaptureError(f"{output} holds earlier tracks; choose another folder")
        ended = tuple(_run(command, folder, run) for run in range(1 if known else runs + 1))
        try:
            seen = read_tracks(folder)
        except DumpError:
            return Chaos(None, ended)
    tracks, observed = (known, seen[0]) if known else (seen, None)
    nudged = [track for run, track in sorted(tracks.items()) if run]
    if len(nudged) < FEWEST:
        how = "".join(f"; the command {ending(code)}" for code in ended if code)
        raise DumpError(f"only {len(nudged)} nudged runs were seen to their first step; {FEWEST} are needed{how}")
    return Chaos(place(tracks.get(0, {}), nudged, observed), ended)


def _run(command: Sequence[str], folder: Path, run: int) -> int:
    """The reference is run 0, every other one is nudged by its number."""
    return launch(command, DRIFT_VARIABLE, {"path": str(folder), "run": run, "seed": run or None})
