"""Reading a small YAML file from anybody: plain data, no aliases, one error.

An alias is a name for a part written before; nine lines of them unfold into more than any memory holds. No file that we
read has a use for one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ulpscope.model.errors import ConfigError

_DEEPEST = 16


def read_yaml(path: Path, *, most_bytes: int) -> Any:
    """What a file holds, as plain data. Raises ConfigError, naming the file, when it is too long or is no such YAML."""
    # Heavy, and needed by few.
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not read here; write the names out")
            if self.depth > _DEEPEST:
                raise yaml.YAMLError(f"nested deeper than {_DEEPEST} levels")
            self.depth += 1
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

    try:
        with path.open("rb") as file:
            text = file.read(most_bytes + 1)
        if len(text) > most_bytes:
            raise ConfigError(
                [f"is larger than {most_bytes} bytes; it holds only names of calls and indices"], str(path)
            )
        return yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror or error}"], str(path)) from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            [f"cannot be read, it is not yaml: {' '.join(str(error).split())[:400]}"], str(path)
        ) from error
