"""How two programs correspond, as lines of text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ulpscope.compare.correspondence import Correspondence


def correspondence_lines(found: Correspondence) -> Iterator[str]:
    """Modules that are called otherwise, those of one side alone, and how many values are in both."""
    renamed = {mine: theirs for mine, theirs in found.modules.items() if mine != theirs}
    same = len(found.modules) - len(renamed)
    yield f"modules    {len(found.modules)} correspond, {same} of them by the same name"
    width = max(map(len, renamed), default=0)
    yield from (f"  {mine:<{width}}  is {theirs}" for mine, theirs in renamed.items())
    for word, names in (("reference", found.only_reference), ("target", found.only_target)):
        if names:
            yield f"only in the {word}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
    yield f"calls      {found.calls[1]} here, {found.calls[0]} in the reference"
    for each in found.passes:
        if each.values:
            yield f"{each.name:<10} {each.found} of {each.values} values that say something are in the reference"


def correspondence_json(found: Correspondence) -> dict[str, Any]:
    """The same."""
    return asdict(found)
