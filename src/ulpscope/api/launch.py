"""Running a command with something switched on in every Python process below it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ulpscope.capture.folder import RUN_VARIABLE
from ulpscope.model.errors import CaptureError

_BOOTSTRAP = Path(__file__).parent / "bootstrap"
# Exit codes: what was seen is not all, or there was nothing to see.
CUT, NOTHING = 3, 4
_STDERR = 2  # its number: whoever calls us may have put something else into sys.stderr


def launch(command: Sequence[str], variable: str, options: Mapping[str, Any]) -> int:
    """As `run`; what the program prints goes to stderr, since it is not the result of ours."""
    return run(command, variable, options, stdout=_STDERR)


def run(command: Sequence[str], variable: str, options: Mapping[str, Any], *, stdout: Any = None) -> int:
    """The exit code of the command, negative for a signal. Whoever asks us to end asks the command."""
    environment = {
        **os.environ,
        variable: json.dumps(options),
        RUN_VARIABLE: uuid.uuid4().hex,
        "PYTHONPATH": os.pathsep.join([str(_BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    try:
        child = subprocess.Popen(list(command), env=environment, stdout=stdout)
    except OSError as error:
        raise CaptureError(f"cannot run {command[0]}: {error.strerror}") from None
    # Only the main thread may have handlers; another one is not who is asked to end.
    forwarded = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = [signal.signal(number, lambda received, _: child.send_signal(received)) for number in forwarded]
    try:
        with child:
            try:
                return child.wait()
            except BaseException:
                child.kill()
                raise
    finally:
        for number, handler in zip(forwarded, before, strict=True):
            signal.signal(number, handler)


def ending(code: int) -> str:
    """How a command ended that did not end well: what it did until then is no proof that nothing is wrong."""
    names = {-number.value: f" ({number.name})" for number in signal.Signals}
    return f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}{names.get(code, '')}"
