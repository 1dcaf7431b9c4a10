"""Run by a peer's Python: its own `msprobe compare`, once for each job.

    python run_compare.py jobs.json

A job is {"target", "golden", "out"}: two files dump.json, and the folder for the result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jobs
from msprobe import msprobe


def compare(job: jobs.Job) -> None:
    """The command line of the peer, with arguments of a job."""
    Path(job["out"]).mkdir(parents=True)
    sys.argv = ["msprobe", "compare", "-o", job["out"], "-tp", job["target"], "-gp", job["golden"]]
    msprobe.main()


if __name__ == "__main__":
    sys.exit(1 if jobs.run(json.loads(Path(sys.argv[1]).read_text()), compare) else 0)
