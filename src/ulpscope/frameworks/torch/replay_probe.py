"""All taps that a live ledger needs: names from the usual taps, kernels from the replaying mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn import Module

from ulpscope.frameworks.torch.probe import TorchProbe, is_data_worker, models_of
from ulpscope.frameworks.torch.replay_mode import Emit, Namer, ReplayMode, ReplayTap
from ulpscope.frameworks.torch.replay_place import Places
from ulpscope.model.records import Level

__all__ = ["ReplayProbe", "in_torch", "is_data_worker", "models_of"]
_TORCH = str(Path(torch.__file__).parent)


def in_torch(file: str) -> bool:
    """Whether a file is part of torch."""
    return file.startswith(_TORCH)


class Unmeasured:
    """Stands where a capture has its measurer: the ledger measures no values, it compares kernels with themselves."""

    leaf_types: frozenset[type] = frozenset()
    reuses = False

    def begin_window(self) -> None:
        pass

    def if_unwritten(self, value: Any) -> str | None:
        return None

    def called(self, *told: Any) -> None:
        pass

    def forget(self, values: Iterable[Any]) -> None:
        pass

    def distrust(self, values: Iterable[Any]) -> None:
        pass

    def measure_anew(self, values: Iterable[Any]) -> None:
        pass

    def kernel_wrote(self, *told: Any) -> None:
        pass

    def release(self, value: Any) -> None:
        pass


class ReplayProbe:
    """Installs and removes the taps of a live ledger."""

    def __init__(
        self,
        observer: Namer,
        emit: Emit,
        source: Callable[[int], tuple[str, int, str] | None],
        *,
        models: Sequence[Module],
    ) -> None:
        self._places = Places(models, source)
        tap = self._tap = ReplayTap(observer, emit, self._places)
        self._probe = TorchProbe(
            observer,
            Unmeasured(),  # type: ignore[arg-type]
            level=Level.KERNEL,
            models=models,
            kernel_mode=lambda state: ReplayMode(tap, state),
        )
        self.modules = self._probe.modules

    def install(self) -> None:
        self._places.install()
        try:
            self._probe.install()
        except BaseException:
            self._places.remove()
            raise

    def remove(self) -> None:
        self._probe.remove()
        self._places.remove()

    def begin_step(self) -> None:
        self._places.begin_step()

    def tidy(self, caller: FrameType | None) -> None:
        self._probe.tidy(caller)

    def ignore(self, ignored: Callable[[FrameType], bool] | None) -> None:
        """Kernels that are called from such frames are not judged."""
        self._tap.ignored = ignored

    def forget(self) -> None:
        """Begins anew: what was seen until now is no part of what is judged, and the modes that are on play the device."""
        self._probe.rise()
        self._places.begin_step()
        self._tap.forget()
