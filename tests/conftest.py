"""For all tests: generated examples are the same in every run, a busy machine is no failure, and torch stays as it was."""

from collections.abc import Iterator

import pytest
import torch.nn.functional as F
from hypothesis import settings
from torch.nn.modules.dropout import _DropoutNd

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# Taking a name of msprobe's switches dropout off for the process, as its manual promises: the next test needs it again.
_DROPOUT = {function: function.__code__ for function in (F.dropout, F.dropout2d, F.dropout3d, _DropoutNd.__init__)}


@pytest.fixture(autouse=True)
def dropout_as_before() -> Iterator[None]:
    yield
    for function, code in _DROPOUT.items():
        if function.__code__ is not code:
            function.__code__ = code
