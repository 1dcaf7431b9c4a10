"""msprobe's merge_result: its configuration file and the name of its workbook."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.model.errors import ConfigError, did_you_mean
from ulpscope.report.merge import chosen_indices, merged_sheets, read_results
from ulpscope.report.xlsx import write_xlsx
from ulpscope.store.files.yaml_file import read_yaml

_MAX_CONFIG = 256 << 10
_KEYS = ("api", "compare_index")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Which calls to merge, and which indices of them; all indices if none is named."""

    api: tuple[str, ...]
    compare_index: tuple[str, ...] | None = None


def merge_result(input_dir: str | Path, output_dir: str | Path, config_path: str | Path) -> Path:
    """Merges the compare results of all ranks in a folder into one workbook, and returns its path.

    Raises ConfigError if the configuration is wrong, and DumpError if the results cannot be merged.
    """
    config = load_merge_config(Path(config_path))
    results = read_results(Path(input_dir), config.api)
    indices = chosen_indices(results, config.compare_index)
    path = Path(output_dir) / f"multi_ranks_compare_merge_{time.strftime('%Y%m%d%H%M%S')}.xlsx"
    for note in write_xlsx(path, merged_sheets(results, indices)):
        _log.warning("%s: %s", path, note)
    _log.info("The compare results of the multi-ranks are merged and saved in: %s.", path)
    return path


def load_merge_config(path: Path) -> MergeConfig:
    """Reads and checks the configuration file. Raises ConfigError."""
    content = read_yaml(path, most_bytes=_MAX_CONFIG)
    if not content:
        raise ConfigError(["config.yaml is empty, please check. It names the calls to merge under 'api'"], str(path))
    if not isinstance(content, Mapping):
        raise ConfigError(
            [f"it must be a table with the keys 'api' and 'compare_index', not {content!r:.80}"], str(path)
        )
    problems = [f"unknown key {key!r}.{did_you_mean(str(key), _KEYS)}" for key in content if key not in _KEYS]
    api: Any = content.get("api")
    index: Any = content.get("compare_index")
    if not api:
        problems.append(
            "The APIs required to merge data were not found. Name them under 'api': - Distributed.all_reduce"
        )
    elif not _are_texts(api):
        problems.append(
            f"The config format of 'api' is incorrect, please check. It is a list of names, not {api!r:.80}"
        )
    if index and not _are_texts(index):
        problems.append(
            f"The config format of 'compare_index' is incorrect, please check. It is a list of names, not {index!r:.80}"
        )
    if problems:
        raise ConfigError(problems, str(path))
    return MergeConfig(tuple(dict.fromkeys(api)), tuple(index) if index else None)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)
