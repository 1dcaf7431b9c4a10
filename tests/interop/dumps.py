"""Dumps of the models, made once per test session and shared by the workers of pytest-xdist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from interop.peers import Peer, locked, python

HERE = Path(__file__).resolve().parent
LEVELS = ("L0", "L1", "mix")
# kind of dump -> task and summary_mode of config.json
KINDS = {"statistics": ("statistics", "statistics"), "md5": ("statistics", "md5"), "tensor": ("tensor", "")}


@dataclass(frozen=True)
class Dumps:
    """Makes dumps below `base` when they are first asked for: all levels and kinds of a model by one process."""

    base: Path

    def peer(self, peer: Peer, model: str, level: str, kind: str) -> Path:
        return self._one(peer.version, [str(python(peer)), str(HERE / "run_peer.py")], model, level, kind)

    def ours(self, model: str, level: str, kind: str) -> Path:
        return self._one("ours", [sys.executable, str(HERE / "run_ours.py")], model, level, kind)

    def gradients(self, side: str, model: str, level: str, kind: str) -> dict[str, str]:
        """CRC-32 of each parameter's gradient after the step that was dumped."""
        return json.loads((self.base / side / f"{model}-{level}-{kind}.gradients.json").read_text())

    def plain(self, model: str) -> dict[str, str]:
        """The same from a step that nobody recorded."""
        self._run("plain", [sys.executable, str(HERE / "run_ours.py"), "--plain"], model, [("L0", "statistics")])
        return self.gradients("plain", model, "L0", "statistics")

    def compared(self, peer: Peer, model: str, level: str, kind: str) -> Path:
        """The folder with the result of the peer's own comparison: its dump is the target, ours the golden one."""
        target, golden = self.peer(peer, model, level, kind), self.ours(model, level, kind)
        out = self.base / "compared" / f"{model}-{level}-{kind}"
        with locked(self.base / "compared.lock"):
            if not out.is_dir():
                out.mkdir(parents=True)
                command = [str(python(peer)), "-m", "msprobe.msprobe", "compare", "-o", str(out)]
                command += ["-tp", str(_dump_json(target)), "-gp", str(_dump_json(golden))]
                _checked(command, out / "log")
        return out

    def _one(self, side: str, command: list[str], model: str, level: str, kind: str) -> Path:
        self._run(side, command, model, [(each, name) for each in LEVELS for name in KINDS])
        out = self.base / side / f"{model}-{level}-{kind}"
        trouble = Path(f"{out}.error")
        if trouble.is_file():
            raise AssertionError(f"{side} could not dump {out.name}:\n{trouble.read_text()}")
        return out

    def _run(self, side: str, command: list[str], model: str, wanted: list[tuple[str, str]]) -> None:
        folder = self.base / side
        jobs = folder / f"{model}.json"
        with locked(self.base / f"{side}-{model}.lock"):
            if jobs.is_file():
                return
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(
                [
                    {
                        "model": model,
                        "level": level,
                        "task": KINDS[kind][0],
                        "summary_mode": KINDS[kind][1],
                        "out": str(folder / f"{model}-{level}-{kind}"),
                    }
                    for level, kind in wanted
                ]
            )
            draft = folder / f"{model}.draft"
            draft.write_text(text)
            try:
                _checked([*command, str(draft)], folder / f"{model}.log", may_fail=True)
            finally:
                draft.rename(jobs)


def _dump_json(out: Path) -> Path:
    return next(out.rglob("dump.json"))


def _checked(command: list[str], log: Path, *, may_fail: bool = False) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env=environment, timeout=600, check=False).returncode
    if code and not may_fail:
        raise AssertionError(f"{' '.join(command)} ended with {code}:\n{log.read_text()[-2000:]}")
