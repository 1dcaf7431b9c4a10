"""Dumps of the models and their comparisons, made once and shared by the workers of pytest-xdist."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from interop import peers
from interop.exceptions import LEVELS
from interop.peers import NEWEST, Peer, locked, python

HERE = Path(__file__).resolve().parent
# kind of dump -> task and summary_mode of config.json
KINDS = {"statistics": ("statistics", "statistics"), "md5": ("statistics", "md5"), "tensor": ("tensor", "")}


@dataclass(frozen=True)
class Dumps:
    """Makes dumps below `base` when they are first asked for: all levels and kinds of a model by one process. Those of the
    peers are kept between runs, beside their environments."""

    base: Path

    def peer(self, peer: Peer, model: str, level: str, kind: str) -> Path:
        return self._one(_kept(peer), [str(python(peer)), str(HERE / "run_peer.py")], model, level, kind)

    def ours(self, model: str, level: str, kind: str) -> Path:
        return self._one(self.base / "ours", [sys.executable, str(HERE / "run_ours.py")], model, level, kind)

    def changed(self, model: str, level: str, kind: str) -> dict[str, bool]:
        """Whether the parameters' gradients after the step that was dumped differ from those of a step that nobody recorded:
        by us, and by the newest peer."""
        plain = self.base / "plain"
        _run(plain, [sys.executable, str(HERE / "run_ours.py"), "--plain"], model, [("L0", "statistics")])
        alone = _gradients(plain, model, "L0", "statistics")
        sides = {"ours": self.base / "ours", "peer": _kept(NEWEST)}
        return {side: _gradients(folder, model, level, kind) != alone for side, folder in sides.items()}

    def compared(self, model: str, level: str, kind: str) -> Path:
        """The result of the newest peer's own comparison: its dump is the target, ours the golden one. All kinds at once."""
        folder = self.base / "compared"
        wanted = folder / f"{model}-{level}.json"
        with locked(wanted.with_suffix(".lock")):
            if not wanted.is_file():
                jobs = [
                    {
                        "target": str(_dump_json(self.peer(NEWEST, model, level, each))),
                        "golden": str(_dump_json(self.ours(model, level, each))),
                        "out": str(folder / f"{model}-{level}-{each}"),
                    }
                    for each in KINDS
                ]
                _call([str(python(NEWEST)), str(HERE / "run_compare.py")], jobs, wanted)
        out = _done(folder / f"{model}-{level}-{kind}")
        return next(out.glob("*.csv"))

    def _one(self, folder: Path, command: list[str], model: str, level: str, kind: str) -> Path:
        _run(folder, command, model, [(each, name) for each in LEVELS for name in KINDS])
        return _done(folder / f"{model}-{level}-{kind}")


def _kept(peer: Peer) -> Path:
    """Where the dumps of a peer lie: another place for other models or another Python."""
    told = [str(python(peer)), *((HERE / name).read_text() for name in ("models.py", "run_peer.py", "jobs.py"))]
    digest = hashlib.sha256("\0".join(told).encode()).hexdigest()[:12]
    return peers.folder() / f"dumps-{peer.version}-{digest}"


def _run(folder: Path, command: list[str], model: str, wanted: list[tuple[str, str]]) -> None:
    done = folder / f"{model}.json"
    with locked(folder / f"{model}.lock"):
        if not done.is_file():
            jobs = [
                {
                    "model": model,
                    "level": level,
                    "task": KINDS[kind][0],
                    "summary_mode": KINDS[kind][1],
                    "out": str(folder / f"{model}-{level}-{kind}"),
                }
                for level, kind in wanted
            ]
            for job in jobs:  # of a run that was broken off
                shutil.rmtree(job["out"], ignore_errors=True)
            _call(command, jobs, done)


def _call(command: list[str], jobs: list[dict[str, str]], done: Path) -> None:
    """Runs a script with its jobs; `done` is there afterwards. What fails is told beside the job's folder."""
    draft = done.with_suffix(".draft")
    draft.write_text(json.dumps(jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with done.with_suffix(".log").open("w") as log:
        subprocess.run([*command, str(draft)], stdout=log, stderr=log, env=environment, timeout=600, check=False)
    draft.rename(done)


def _done(out: Path) -> Path:
    trouble = Path(f"{out}.error")
    if trouble.is_file() or not out.is_dir():
        told = trouble.read_text() if trouble.is_file() else "no such folder was made; see the .log beside it"
        raise AssertionError(f"{out} could not be made:\n{told[-4000:]}")
    return out


def _gradients(folder: Path, model: str, level: str, kind: str) -> dict[str, str]:
    """CRC-32 of each parameter's gradient."""
    found: dict[str, str] = json.loads((folder / f"{model}-{level}-{kind}.gradients.json").read_text())
    return found


def _dump_json(out: Path) -> Path:
    return next(out.rglob("dump.json"))
