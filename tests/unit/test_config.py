"""Options: every mistake at once, with place and suggestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ulpscope.model.errors import ConfigError
from ulpscope.model.options import CaptureConfig, capture_config, numbers, read_config_file
from ulpscope.model.records import Level, Phase, Role


def test_options_are_read_into_types() -> None:
    found = capture_config(
        {"path": "a", "level": "mix", "steps": "0,10:12", "only": "relu", "phases": ["forward"], "roles": "output"}
    )
    assert found == CaptureConfig(
        path="a", level=Level.MIX, steps=(0, (10, 12)), only=("relu",), phases=(Phase.FORWARD,), roles=(Role.OUTPUT,)
    )


def test_what_was_written_to_a_manifest_reads_back_the_same() -> None:
    config = capture_config({"steps": [1, "3:4"], "scope": ["a", "b"], "level": "kernel", "below": "x.0.forward"})
    assert capture_config(config.as_json()) == config


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        capture_config({"levle": "op", "level": "opp", "steps": [-1], "phases": ["fwd"], "queue_mb": 0}, "config.json")
    assert str(caught.value).splitlines() == [
        "config.json: unknown key 'levle'. Did you mean 'level'?",
        "config.json: level = \"opp\": must be one of module, op, mix, kernel. Did you mean 'op'?",
        "config.json: steps = [-1]: -1 must be a whole number from 0 on, or a range such as '10:12'",
        'config.json: phases = ["fwd"]: must be one of forward, backward',
        "config.json: queue_mb = 0: must be a whole number of megabytes, 1 or more",
        "5 problems, nothing was done",
    ]


@pytest.mark.parametrize(
    ("value", "found"),
    [(3, (3,)), ("3", (3,)), ("0,10:12", (0, (10, 12))), ([0, "2-4"], (0, (2, 4))), (range(2), (0, 1)), ([], ())],
)
def test_numbers_and_ranges(value: Any, found: Any) -> None:
    assert numbers(value) == found


@pytest.mark.parametrize("value", ["x", "3:1", [1.5], [True], [None], "-1", ["1:2:3"], float("nan")])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        numbers(value)


def test_below_belongs_to_the_kernel_level() -> None:
    with pytest.raises(ConfigError, match="works at level kernel only"):
        capture_config({"below": "Functional.conv2d.0.forward"})


def test_toml_and_json_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('level = "mix"\nsteps = [0, "2:3"]\n')
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"level": "mix", "steps": [0, "2:3"]}')
    assert read_config_file(tmp_path / "a.toml") == read_config_file(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '{"level": "op",}', "line 1 column"),
        ("a.json", "[1]", "top level must be a table"),
        ("a.json", "null", "top level must be a table"),
        ("a.json", '{"level": "op", "level": "mix"}', "'level' is there twice"),
        ("a.json", "[" * 100_000, "a.json"),
        ("a.toml", "level = ", "Invalid value"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(tmp_path / name)
    assert name in str(caught.value)
    assert says in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json does not exist"):
        read_config_file(tmp_path / "nothing.json")
