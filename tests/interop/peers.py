"""Virtual environments with the real peer, one per version, kept between runs.

They lie in $ULPSCOPE_PEERS, or in .peers/ of the repository. An environment that is not there is made only when ULPSCOPE_INTEROP=1
says so: it takes minutes. $ULPSCOPE_PEER_26 (_8, _1) names the Python of an environment made by hand.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
_RETRY_SECONDS = 3600


@dataclass(frozen=True)
class Peer:
    """One version of mindstudio-probe. torch is installed before the pins: the peer must not choose it."""

    version: str
    pins: tuple[str, ...]
    transformers: bool = False

    @property
    def variable(self) -> str:
        return f"ULPSCOPE_PEER_{self.version.partition('.')[0]}"


# The pins are those of the table at the top of FEATURES.md.
NEWEST = Peer("26.2.0", ("mindstudio-probe==26.2.0",), transformers=True)
OLDER = (
    Peer("8.2.1", ("numpy<2", "mindstudio-probe==8.2.1")),
    Peer("1.0.3", ("numpy<2", "pandas==2.0.3", "service_identity", "mindstudio-probe==1.0.3")),
)


def folder() -> Path:
    """Where the environments lie."""
    return Path(os.environ.get("ULPSCOPE_PEERS") or ROOT / ".peers")


def python(peer: Peer) -> Path:
    """The Python of a peer's environment, which is made if need be; skips the test when it cannot be had."""
    given = os.environ.get(peer.variable)
    if given:
        if not Path(given).is_file():
            pytest.fail(f"{peer.variable} names {given}, which is not there")
        return Path(given)
    home = folder() / peer.version
    found = home / "bin" / "python"
    if (home / "complete").is_file():
        return found
    if os.environ.get("ULPSCOPE_INTEROP") != "1":
        pytest.skip(
            f"mindstudio-probe {peer.version} is not installed in {home}; ULPSCOPE_INTEROP=1 installs it (minutes), "
            f"{peer.variable}=/path/to/python uses another environment"
        )
    with locked(folder() / f"{peer.version}.lock"):
        if not (home / "complete").is_file():
            _make(peer, home)
    return found


def _make(peer: Peer, home: Path) -> None:
    failed = home.with_name(home.name + ".failed")
    if failed.is_file() and time.time() - failed.stat().st_mtime < _RETRY_SECONDS:
        pytest.skip(f"mindstudio-probe {peer.version} could not be installed ({failed}): {failed.read_text()[-300:]}")
    shutil.rmtree(home, ignore_errors=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    extra = [f"transformers=={importlib.metadata.version('transformers')}"] if peer.transformers else []
    for command in ([sys.executable, "-m", "venv", str(home)], [*pip, TORCH], [*pip, TORCH, *peer.pins, *extra]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(home, ignore_errors=True)
            failed.write_text(done.stdout + done.stderr)
            pytest.skip(f"mindstudio-probe {peer.version} could not be installed: {(done.stdout + done.stderr)[-300:]}")
    failed.unlink(missing_ok=True)
    (home / "complete").touch()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time is inside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
