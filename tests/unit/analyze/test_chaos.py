"""Placing a run among nudged ones, with tracks made by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ulpscope.analyze.chaos import Origin, place
from ulpscope.model.errors import DumpError
from ulpscope.report.chaos import chaos_json, chaos_lines
from ulpscope.store.loss_curve import Point, Track, add_point, read_tracks, track_path


def track(*losses: float, output: tuple[float, ...] = ()) -> Track:
    return {(step, 0): Point(step, 0, loss, output) for step, loss in enumerate(losses)}


REFERENCE = track(2.0, 1.0)
NUDGED = [track(2.0 + size, 1.0 - 4 * size) for size in (0.01, -0.02, 0.03)]


def test_a_gap_as_large_as_drift_is_chaos() -> None:
    found = place(REFERENCE, NUDGED, track(2.015, 1.08))
    assert found.origin is Origin.CHAOS
    assert found.first_beyond is None
    assert [drift.what for drift in found.drifts] == ["loss", "loss"]
    assert found.drifts[0].nudged == pytest.approx((0.01, 0.02, 0.03))
    assert found.drifts[0].quantile == 1 / 3


def test_the_same_run_differs_nowhere() -> None:
    found = place(REFERENCE, NUDGED, REFERENCE)
    assert (found.observed, found.quantile, found.origin) == (0, 0, Origin.CHAOS)
    assert chaos_lines(found, runs=["a", "b"])[-1].endswith("nothing differs at any step")


def test_a_gap_far_beyond_drift_is_not_chaos_and_its_first_step_is_named() -> None:
    found = place(REFERENCE, NUDGED, track(2.01, 3.0))
    assert (found.origin, found.quantile) == (Origin.BUG, 1.0)
    assert found.first_beyond is not None
    assert (found.first_beyond.step, found.first_beyond.what) == (1, "loss")
    # The root mean square of 0.04, 0.08 and 0.12 is 0.0864; of the nudged runs the third is worst, 0.12 to 0.0632.
    assert found.observed == pytest.approx(2 / 0.08640987)
    assert max(found.scores) == pytest.approx(0.12 / 0.06324555)
    assert chaos_json(found, runs=[])["first_beyond"] == {"step": 1, "rank": 0, "what": "loss"}


def test_a_little_more_than_drift_is_not_sure() -> None:
    assert place(REFERENCE, NUDGED, track(2.0, 1.3)).origin is Origin.UNSURE


def test_where_nothing_drifts_one_rounding_is_no_bug() -> None:
    still = [REFERENCE] * 3
    assert place(REFERENCE, still, track(2.0, 1.0 + 2**-24)).origin is not Origin.CHAOS
    assert place(REFERENCE, [*still, track(2.0, 1.0 + 2**-24)], track(2.0, 1.0 + 2**-24)).origin is Origin.CHAOS
    assert place(REFERENCE, still, track(2.0, 1.001)).origin is Origin.BUG


def test_a_loss_that_is_not_a_number_is_not_chaos_unless_drift_does_it_too() -> None:
    assert place(REFERENCE, NUDGED, track(2.0, math.nan)).origin is Origin.BUG
    assert place(REFERENCE, [*NUDGED, track(2.0, math.nan)], track(2.0, math.nan)).origin is Origin.CHAOS


def test_outputs_count_relative_to_their_size() -> None:
    reference = track(1.0, output=(3.0, 4.0))
    nudged = [track(1.0, output=(3.0, 4.0 + size)) for size in (0.05, 0.1, 0.15)]
    found = place(reference, nudged, track(1.0, output=(3.0, 5.0)))
    drift = next(drift for drift in found.drifts if drift.what == "output")
    assert drift.observed == pytest.approx(0.2)
    assert drift.nudged == pytest.approx((0.01, 0.02, 0.03))


def test_two_runs_say_nothing_about_drift() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        place(REFERENCE, NUDGED[:2])


def test_tracks_are_read_as_they_were_written_and_a_cut_line_ends_one(tmp_path: Path) -> None:
    point = Point(0, 1, None, (1.5, -2.0))
    add_point(track_path(tmp_path, 3, 1), point)
    with track_path(tmp_path, 3, 1).open("a") as file:
        file.write('{"step": 1, "lo')
    assert read_tracks(tmp_path) == {3: {(0, 1): point}}
    with pytest.raises(DumpError, match="ulpscope chaos -o"):
        read_tracks(tmp_path / "nowhere")
