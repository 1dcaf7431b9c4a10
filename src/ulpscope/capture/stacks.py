"""Python stacks, each distinct one once.

A stack is kept as a chain: the frames inside the innermost module, then the stack of the call of that module. Walking
stops at that module's frame, so a deep model costs no more than a shallow one.
"""

from __future__ import annotations

import json
import linecache
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ulpscope.frameworks.base import STAND_IN

_OWN = str(Path(__file__).resolve().parent.parent)
_LIBRARY = tuple({sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib")})
# As good as id() for objects that are kept, and no audit event: see frameworks.torch.summary.
_identity = object.__hash__


class Stacks:
    """Numbers for stacks. `store` puts one JSON entry into the dump and returns its number."""

    def __init__(self, store: Callable[[Any], int]) -> None:
        self._store = store
        self._numbers: dict[tuple[int, ...], int] = {}
        self._frames: dict[tuple[int, int], list[Any] | None] = {}
        self._codes: dict[int, CodeType] = {}
        self._recomputing: dict[int, bool] = {}

    def begin_step(self) -> None:
        self._numbers.clear()
        self._recomputing.clear()

    def number(self, frame: FrameType | None, stop: FrameType | None, above: int) -> int:
        """The number of the stack that begins at `frame`; `above` is the number of the stack at frame `stop`."""
        key = [above]
        walk = frame
        while walk is not None and walk is not stop:
            key.append(_identity(walk.f_code))
            key.append(walk.f_lasti)
            walk = walk.f_back
        whole = tuple(key)
        found = self._numbers.get(whole)
        if found is None:
            found = self._numbers[whole] = self._enter(frame, stop, above)
        return found

    def is_recomputing(self, number: int) -> bool:
        """Whether the stack passes through torch's checkpointing."""
        return self._recomputing.get(number, False)

    def frames_text(self, frame: FrameType | None, stop: FrameType | None) -> tuple[str, bool]:
        """The frames as JSON, and whether they pass through torch's checkpointing."""
        frames, recomputing = self._rows(frame, stop)
        return json.dumps(frames), recomputing

    def _enter(self, frame: FrameType | None, stop: FrameType | None, above: int) -> int:
        frames, recomputing = self._rows(frame, stop)
        number = self._store({"frames": frames, "parent": above if above >= 0 else None})
        self._recomputing[number] = recomputing or self._recomputing.get(above, False)
        return number

    def _rows(self, frame: FrameType | None, stop: FrameType | None) -> tuple[list[list[Any]], bool]:
        rows = []
        while frame is not None and frame is not stop:
            row = self._row(frame)
            if row is not None:
                rows.append(row)
            frame = frame.f_back
        return rows, any(row[0].endswith("torch/utils/checkpoint.py") for row in rows)

    def _row(self, frame: FrameType) -> list[Any] | None:
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        if key not in self._frames:
            self._codes[id(code)] = code  # keeps the id from being used again
            self._frames[key] = _describe(code, frame.f_lineno)
        return self._frames[key]


def _describe(code: CodeType, line: int | None) -> list[Any] | None:
    file = code.co_filename
    if file.startswith(_OWN) or code.co_name == STAND_IN:
        return None
    text = linecache.getline(file, line or 0).strip()[:300]
    name = getattr(code, "co_qualname", code.co_name)
    return [file, line or 0, name, text, file.startswith(_LIBRARY) or file.startswith("<")]
