"""Jobs of the scripts that run in a Python of their own: each in a forked child, so that heavy imports are paid once."""

from __future__ import annotations

import atexit
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def run(jobs: list[Job], work: Callable[[Job], None]) -> int:
    """How many jobs failed; each failure is told in `out`.error."""
    failed = 0
    for job in jobs:
        Path(job["out"]).parent.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(job)
                atexit._run_exitfuncs()  # what is written at exit, which os._exit would leave out
                code = 0
            except BaseException:
                Path(job["out"] + ".error").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    return failed
