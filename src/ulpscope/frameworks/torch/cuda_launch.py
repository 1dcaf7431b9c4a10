"""Launching a compiled Triton kernel for a few microseconds: Triton's own way looks the kernel up at each launch."""

from __future__ import annotations

from typing import Any

import torch

from ulpscope.native import taps


class Launch:
    """One kernel with its constants on one device. The first call compiles it; `direct` says whether the later ones may
    go past Triton's front end."""

    __slots__ = ("_before", "_constants", "_device", "_direct", "_kernel", "_options", "_run", "for_c")

    def __init__(
        self,
        kernel: Any,
        constants: tuple[Any, ...],
        device: torch.device,
        *,
        direct: bool,
        registers: int | None = None,
    ) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = {"maxnreg": registers} if registers is not None and torch.version.cuda is not None else {}
        self._device = device if device.type == "cuda" else None
        self._direct = direct
        self._run: Any = None
        self._before: tuple[Any, ...] = ()
        # The same kernel, to be launched from C; it has no function until it is compiled.
        self.for_c = None if taps.C is None else taps.C.Kernel()

    def __call__(self, programs: int, stream: int, *arguments: int) -> None:
        if self._run is not None:
            self._run(programs, 1, 1, stream, *self._before, *arguments, *self._constants)
            return
        with torch.cuda.device(self._device):
            made = self._kernel[(programs,)](*arguments, *self._constants, **self._options)
        if self._direct and self._device is not None:
            self._remember(made)

    def _remember(self, made: Any) -> None:
        run = made.run
        self._before = (made.function, made.packed_metadata, None, None, None)
        inner = getattr(run, "launch", None)
        scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
        if inner is not None and not scratch and hasattr(run, "launch_pdl"):
            # Past the Python part of the launcher, which only makes scratch memory that ours do not use.
            flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
            self._before = (made.function, *flags, made.packed_metadata, None, None, None)
            run = inner
            if self.for_c is not None and not any(flags):
                metadata = made.metadata
                self.for_c.threads, self.for_c.shared = 32 * metadata.num_warps, metadata.shared
                self.for_c.function = made.function if getattr(metadata, "num_ctas", 1) == 1 else 0
        self._run = run
