"""advisor_{timestamp}.txt, as the older tools name it: the first row that is not accurate, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ulpscope.findings.advice import Suspect, first_suspect
from ulpscope.report.table import replacing


def write_advisor(
    folder: Path, rows: Iterable[tuple[str, str | None]], *, timestamp: str, rank: int | None = None
) -> tuple[Path, Suspect]:
    """The file and what it says, from (name, verdict) of every row; `rank` where several ranks are compared."""
    suspect = first_suspect(rows)
    path = folder / f"advisor_{'' if rank is None else f'rank{rank}_'}{timestamp}.txt"
    with replacing(path) as draft:
        draft.write_text(suspect.content, encoding="utf-8")
    return path, suspect
