"""A mistake in config.json is one clear error that names the key; what can be meant is accepted. Also as native options."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from ulpscope.compat.msprobe.config import load_config
from ulpscope.compat.msprobe.debugger import PrecisionDebugger
from ulpscope.model.errors import ConfigError, UlpscopeError
from ulpscope.model.options import capture_config, read_config_file

PROMISE = "as asked, or one clear error"
case = pytest.mark.case


def written(**keys: Any) -> str:
    return json.dumps({"task": "statistics", "dump_path": "out", "level": "L1", **keys})


# The content of the file, and what the error must say; None where it is accepted.
FILES: dict[str, tuple[str | bytes, str | None]] = {
    "cfg_trailing_comma": ('{"task": "statistics",}', r"config\.json.*line 1 column"),
    "cfg_bom": (b"\xef\xbb\xbf" + written().encode(), None),
    "cfg_top_list": ("[]", "top level must be a table"),
    "cfg_top_null": ("null", "top level must be a table"),
    "cfg_unknown_level": (written(level="L9"), "level.*L0, L1, L2, mix"),
    "cfg_no_dump_path": ('{"task": "statistics"}', "dump_path"),
    "cfg_dump_path_empty": (written(dump_path=""), "dump_path"),
    "cfg_step_string": (written(step="1"), "step"),
    "cfg_step_negative": (written(step=[-1]), "step.*-1"),
    "cfg_step_float": (written(step=[1.5]), r"step.*1\.5"),
    "cfg_step_text_range": (written(step=["a-b"]), "step.*a-b"),
    "cfg_step_huge_range": (written(step=["0-999999999"]), None),
    "cfg_task_list": (written(task=[]), None),
    "cfg_task_table": (written(task={"a": 1}), "task.*statistics"),
    "cfg_task_section_list": (written(statistics=[]), "statistics must be a table"),
    "cfg_list_is_string": (written(statistics={"list": "relu"}), "statistics.list"),
    "cfg_data_mode_typo": (written(statistics={"data_mode": ["forwardd"]}), "data_mode.*forwardd.*forward"),
    "cfg_async_str": (written(async_dump="yes"), "async_dump"),
    "cfg_typo_key_top": (written(setp=[1]), "'setp'.*'step'"),
    "cfg_duplicate_keys": ('{"step": [1], "step": [2], "dump_path": "x"}', "'step' is there twice"),
    "cfg_deep_nesting": ('{"a":' * 100_000 + "1" + "}" * 100_000, r"config\.json"),
    "cfg_nan": ('{"dump_path": "x", "step": [NaN]}', "step.*NaN|step.*nan"),
    "cfg_tensor_without_section": (written(task="tensor"), None),
    "cfg_null_values": (written(step=None, rank=None, statistics=None, seed=None), None),
    "cfg_minimal": ('{"dump_path": "out"}', None),
    "cfg_slice_bad": (written(statistics={"slice": [{"dim": "x"}]}), "slice"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_is_accepted_or_refused_by_name(case: str, tmp_path: Path) -> None:
    content, says = FILES[case]
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.monotonic()
    if says is None:
        load_config(path)
    else:
        with pytest.raises(ConfigError, match=f"(?s){says}"):
            load_config(path)
    assert time.monotonic() - began < 5


@case("cfg_missing_file")
@case("cfg_is_dir")
@pytest.mark.parametrize("read", [load_config, read_config_file], ids=["msprobe", "native"])
def test_a_file_that_is_none_is_named(read: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json does not exist"):
        read(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match="directory"):
        read(tmp_path)


@case("cfg_list_matches_nothing")
def test_a_filter_that_matched_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "config.json"
    path.write_text(written(dump_path=str(tmp_path / "out"), statistics={"list": ["relvu"]}))
    debugger = PrecisionDebugger(str(path))
    debugger.start()
    torch.relu(torch.ones(2))
    debugger.stop()
    debugger.step()
    debugger._close()
    assert "nothing matched 'relvu'" in caplog.text


@case("cfg_bad_regex")
@pytest.mark.parametrize("pattern", ["relu(", "*", "[a-", "\\"])
def test_a_name_is_no_pattern_and_what_it_did_not_match_is_said(
    pattern: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ulpscope.capture(tmp_path, only=[pattern]):
        torch.relu(torch.ones(2))
    assert "nothing matched" in caplog.text


@case("cfg_free_benchmark")
def test_a_task_works_or_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(written(task="free_benchmark", dump_path=str(tmp_path / "out")))
    try:
        PrecisionDebugger(str(path))._close()
    except UlpscopeError as error:
        assert "free_benchmark" in str(error)


NATIVE: dict[str, tuple[dict[str, Any], str]] = {
    "level": ({"level": "deep"}, "level.*module, op, mix, kernel"),
    "steps": ({"steps": [-1]}, "steps.*-1"),
    "steps nan": ({"steps": [float("nan")]}, "steps"),
    "path": ({"path": "a\0b"}, "path"),
    "path empty": ({"path": ""}, "path"),
    "queue_mb": ({"queue_mb": 0}, "queue_mb"),
    "queue_mb huge": ({"queue_mb": 1 << 60}, "queue_mb"),
    "only": ({"only": [""]}, "only"),
    "typo": ({"tensor": True}, "'tensor'.*'tensors'"),
    "several": ({"levle": "op", "steps": "x"}, "(?s)levle.*steps"),
    "odd key": ({3: 4}, "unknown key 3"),
}


@case("misuse: wrong options")
@pytest.mark.parametrize("name", NATIVE)
def test_a_wrong_option_is_named(name: str) -> None:
    options, says = NATIVE[name]
    with pytest.raises(ConfigError, match=says):
        capture_config(options)
