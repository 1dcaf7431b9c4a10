"""What a program has come to, to the last bit: printed at its end."""

import zlib

import torch


def told(*results):
    """One line: numbers as they are, tensors and the states of modules by a checksum."""
    print("RESULT", *map(_text, results), flush=True)


def _text(value):
    if isinstance(value, torch.nn.Module):
        value = list(value.state_dict().values())
    if isinstance(value, torch.Tensor):
        return f"{zlib.crc32(value.detach().contiguous().flatten().view(torch.uint8).numpy()):08x}"
    if isinstance(value, (list, tuple)):
        return f"{zlib.crc32(' '.join(map(_text, value)).encode()):08x}"
    return float(value).hex() if isinstance(value, float) else str(value)
