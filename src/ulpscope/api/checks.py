"""Checks of one run, without a second one: what `ulpscope check` does."""

from __future__ import annotations

import math
import tempfile
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ulpscope.analyze.first_nonfinite import First, first_nonfinite
from ulpscope.analyze.replicas import Agreement, Groups, agreement
from ulpscope.api.launch import CUT, NOTHING, launch
from ulpscope.capture.watch import OPTIONS_VARIABLE
from ulpscope.model.errors import CaptureError, ConfigError, DumpError
from ulpscope.model.options import capture_config
from ulpscope.replay.noise_watch import NOISE_VARIABLE
from ulpscope.replay.results import CallResult, OpsCheck, WrongCall
from ulpscope.replay.standards import Status
from ulpscope.store.dump import Dump
from ulpscope.store.noise import OWN_FILE, NoiseRow, read_rows
from ulpscope.store.registry import find_folders, open_run

if TYPE_CHECKING:
    from ulpscope.replay.overflow import Overflow
    from ulpscope.replay.precheck import Plan


@dataclass(frozen=True, slots=True)
class OverflowCheck:
    """The calls that were given finite values and returned others; of a whole recording where the first nan, or infinity, begins
    (`firsts`, else None). `seen`: any call of torch was; `ended`: how the command did."""

    overflows: tuple[Overflow, ...]
    notes: tuple[str, ...] = ()
    ranks: int = 1
    cut: tuple[str, ...] = ()
    seen: bool = True
    ended: int = 0
    firsts: tuple[First, ...] | None = None

    @property
    def exit_code(self) -> int:
        if self.overflows or self.firsts:
            return 1
        return CUT if self.ended or self.cut else 0 if self.seen else NOTHING


def check_overflow(
    run: str | Path | None = None,
    *,
    command: Sequence[str] | None = None,
    number: int = 1,
    poles: bool = False,
    level: str = "op",
    output: str | Path | None = None,
) -> OverflowCheck:
    """Finds the calls that made inf or nan of finite values: those that an earlier check kept in `run`, or those of `command`. Where
    `run` is a whole recording of any tool, its first one, over all ranks.

    The command is ended at overflow `number` (-1: never). `output` keeps what was found, with its tensors.
    """
    if (run is None) == (command is None):
        raise ConfigError(["check_overflow needs a command, or the folder of an earlier check"])
    if command is None:
        assert run is not None
        return _overflows(open_run(run), 0)
    with tempfile.TemporaryDirectory(prefix="ulpscope-check-") as scratch:
        folder = Path(output or scratch).resolve()
        if output is not None and folder.is_dir() and find_folders(folder):
            raise CaptureError(f"{output} holds an earlier run; choose another folder")
        options = {"path": str(folder), "overflows": number, "poles": poles, "level": level, "sketch": False}
        ended = launch(command, OPTIONS_VARIABLE, capture_config(options, "check overflow").as_json())
        return _overflows(open_run(folder) if folder.is_dir() else [], ended)


def _overflows(dumps: list[Dump], ended: int) -> OverflowCheck:
    if not dumps:
        return OverflowCheck((), seen=False, ended=ended)
    kept = [dump for dump in dumps if dump.manifest.config.get("overflows") is not None]
    if not kept:
        ranks = len({dump.manifest.rank for dump in dumps})
        return OverflowCheck((), (), ranks, _cut(dumps), ended=ended, firsts=tuple(first_nonfinite(dumps)))
    found: list[Overflow] = []
    if any(len(dump) for dump in kept):
        from ulpscope.replay.overflow import overflow_of  # brings torch

        ordered = sorted(kept, key=lambda dump: (dump.manifest.step, dump.manifest.rank))
        found = [overflow_of(dump, call) for dump in ordered for call in dump.calls()]
    notes = sorted({note for dump in kept for note in dump.manifest.notes})
    ranks = max(dump.manifest.world_size for dump in kept)
    return OverflowCheck(tuple(found), tuple(notes), ranks, _cut(kept), ended=ended)


def _cut(dumps: Sequence[Dump]) -> tuple[str, ...]:
    return tuple(
        f"step {dump.manifest.step} rank {dump.manifest.rank}: {dump.ending}"
        for dump in dumps
        if dump.ending != "complete"
    )


@dataclass(frozen=True, slots=True)
class NoiseCheck:
    """The results that changed more than the change of their input explains. `seen`: any call was run twice."""

    rows: tuple[NoiseRow, ...]
    seen: bool
    ended: int

    @property
    def exit_code(self) -> int:
        return 1 if self.rows else CUT if self.ended else 0 if self.seen else NOTHING


def check_noise(
    command: Sequence[str],
    *,
    mode: str = "bit_noise",
    only: Sequence[str] = (),
    steps: int = 1,
    backward: bool = False,
    output: str | Path | None = None,
) -> NoiseCheck:
    """Runs every call of a command a second time with its input slightly changed. `output` keeps the rows."""
    with tempfile.TemporaryDirectory(prefix="ulpscope-check-") as scratch:
        folder = Path(output or scratch).resolve()
        if (folder / OWN_FILE).exists():
            raise CaptureError(f"{output} holds an earlier check; choose another folder")
        options = {"path": str(folder), "mode": mode, "only": list(only), "steps": steps, "backward": backward}
        ended = launch(command, NOISE_VARIABLE, options)
        rows = tuple(row for row in read_rows(folder) if row.is_unexplained)
        return NoiseCheck(rows, (folder / OWN_FILE).exists(), ended)


def check_ranks(run: str | Path, *, replicas: Groups = ()) -> Agreement:
    """Compares what should be equal over data-parallel replicas. `replicas` are groups of ranks; found by themselves without."""
    return agreement(open_run(run), replicas)


def check_ops(
    run: str | Path,
    *,
    device: str | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    once: bool = False,
    processes: int = 1,
    seed: int = 1234,
    save_errors: str | Path | None = None,
) -> OpsCheck:
    """Runs every recorded API call again in float64 on the CPU, and judges what was recorded, or what `device` makes of it."""
    from ulpscope.frameworks.torch.api_arguments import is_known  # brings torch
    from ulpscope.frameworks.torch.api_runner import ApiRunner, default_device
    from ulpscope.replay.precheck import Choice, Plan

    unknown = [f"torch has no operator {name!r}" for name in (*only, *skip) if not is_known(name)]
    if unknown:
        raise ConfigError(unknown)
    dumps = open_run(run)
    if not dumps:
        raise DumpError(f"{run} holds no dump; `ulpscope capture --tensors -o {run} -- CMD` makes one")
    runner = ApiRunner(device or default_device(), seed=seed, recorded=device is None)
    errors = None if save_errors is None else Path(save_errors)
    plan = Plan(runner, Choice(frozenset(only), frozenset(skip), once), error_data=errors)
    found = [(dump, result) for dump in dumps for result in _results(dump, plan, processes)]
    wrong = [_wrong(dump, result) for dump, result in found if result.status is Status.ERROR]
    judged = [result for _, result in found if result.outputs]
    skipped = Counter(
        result.message.partition("not run again: ")[2] or result.message
        for _, result in found
        if not result.outputs or "not run again" in result.message
    )
    return OpsCheck(
        run=str(run),
        device=runner.device,
        calls=len(found),
        judged=len(judged),
        recorded=sum(any(output.recorded for output in result.outputs) for result in judged),
        made_inputs=sum(not result.real for result in judged),
        wrong=tuple(sorted(wrong, key=_excess, reverse=True)),
        not_run=dict(skipped.most_common()),
        missing=0 if wrong else sum(map(_missing, dumps)),
    )


def _results(dump: Dump, plan: Plan, processes: int) -> list[CallResult]:
    from ulpscope.replay.precheck import check_dump, check_in_processes

    if processes > 1:
        return list(check_in_processes(dump.folder, plan, processes=processes))
    return list(check_dump(dump, plan))


def _wrong(dump: Dump, result: CallResult) -> WrongCall:
    outputs = tuple(output for output in result.outputs if output.status is Status.ERROR)
    return WrongCall(dump.manifest.step, dump.manifest.rank, result.name, result.message, outputs)


def _excess(wrong: WrongCall) -> float:
    """How many times the error is what rounding explains, of the worst output; infinite where it has none."""
    found = [output.explained for output in wrong.outputs if output.explained is not None]
    ratios = [each.error / each.limit if math.isfinite(each.error) and each.limit else math.inf for each in found]
    return max(ratios, default=math.inf)


def _missing(dump: Dump) -> int:
    """How many files are; a dump tells when it has been read, which other processes may have done."""
    deque(dump.calls(), maxlen=0)
    return len(dump.missing)
