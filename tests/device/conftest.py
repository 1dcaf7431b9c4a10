"""The stand-in changes its process, so every test that needs it runs a program in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def acl_config(tmp_path: Path) -> Callable[..., Path]:
    """Writes an acl_config.json and the folder it names."""

    def write(**keys: object) -> Path:
        (tmp_path / "kernels").mkdir(exist_ok=True)
        dump = {"dump_list": [], "dump_path": str(tmp_path / "kernels"), "dump_mode": "all", "dump_op_switch": "on"}
        path = tmp_path / "acl_config.json"
        path.write_text(json.dumps({"dump": {**dump, **keys}}))
        return path

    return write
