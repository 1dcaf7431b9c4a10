from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Fields = ParamSpec("_Fields")
_Record = TypeVar("_Record")

def maker(kind: Callable[_Fields, _Record], fields: tuple[str, ...], /) -> Callable[_Fields, _Record]: ...
