"""The C part of a capture: what runs for every call. `C` is None where it could not be built; Python does the same then."""

try:
    from ulpscope import _taps as C
except ImportError:
    C = None  # type: ignore[assignment]

__all__ = ["C"]
