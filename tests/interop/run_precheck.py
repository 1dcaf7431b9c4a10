"""Runs in the peer's environment: its run_ut on a machine without a device, the CPU standing in for the one it asks for."""

import sys

import torch

_to = torch.Tensor.to


def _stays(self, *args, **kwargs):
    return self.clone() if args and "cuda" in str(args[0]) else _to(self, *args, **kwargs)


torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda number: None
torch.cuda.device_count = lambda: 1
torch.cuda.empty_cache = lambda: None
torch.Tensor.cuda = lambda self, *args, **kwargs: self.clone()
torch.Tensor.to = _stays

from msprobe.msprobe import main  # noqa: E402

sys.argv = ["msprobe", *sys.argv[1:]]
main()
