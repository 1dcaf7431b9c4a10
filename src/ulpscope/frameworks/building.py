"""Telling by the frames around a call whether a model is being built or loaded."""

from __future__ import annotations

from types import FrameType

# Building and loading a model is not what a person wants to compare; forward, backward and optimizer are.
_BUILDING = frozenset(
    {
        "init_weights",
        "_init_weights",
        "_initialize_weights",
        "reset_parameters",
        "from_pretrained",
        "load_state_dict",
    }
)


def is_building(frame: FrameType) -> bool:
    """Whether a frame, or one that it was called from, builds or loads a model."""
    walk: FrameType | None = frame
    while walk is not None:
        code = walk.f_code
        if code.co_name in _BUILDING or code.co_filename.endswith("nn/init.py"):
            return True
        if code.co_name == "__init__" and hasattr(type(walk.f_locals.get("self")), "named_parameters"):
            return True
        walk = walk.f_back
    return False
