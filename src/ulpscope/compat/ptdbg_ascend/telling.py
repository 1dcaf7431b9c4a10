"""ptdbg_ascend's parse: what a .pkl says of a call, on the screen. Imports no framework."""

from __future__ import annotations

import sys
from pathlib import Path

from ulpscope.compat.ptdbg_ascend.switch import ArgumentError
from ulpscope.report.pkl_rows import call_lines
from ulpscope.store.registry import open_dump


def parse(pkl_file: str, module_name_prefix: str) -> None:
    """Shows the statistics and the stacks of the calls whose names begin with `module_name_prefix`.

    ArgumentError for a file that is not there. Where there is no such call, this is said in one line.
    """
    if not isinstance(pkl_file, str) or not Path(pkl_file).is_file():
        raise ArgumentError(f"Please check the pkl path is valid. pkl_file is {pkl_file!r}")
    if not isinstance(module_name_prefix, str) or not module_name_prefix:
        raise ArgumentError(f"module_name_prefix is {module_name_prefix!r}; it must be a name as Torch_norm_1_forward")
    lines = list(call_lines(open_dump(pkl_file), module_name_prefix))
    if not lines:
        lines = [f"{pkl_file} has no call whose name begins with {module_name_prefix!r}"]
    sys.stdout.write("\n".join(lines) + "\n")
