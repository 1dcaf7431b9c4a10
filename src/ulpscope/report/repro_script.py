"""The text of `repro.py`: a script that depends on torch alone and shows what is wrong with one call.

The call and its description are filled in; all else is the same for every call. It stands on its own: nothing of ulpscope is
imported by it.
"""

from __future__ import annotations

HEAD = '''"""{title}

Needs torch and the file tensors.safetensors beside it. Runs the call on every device that is here and in float64 on the CPU,
and prints how far each result is from the float64 one.
"""

import json
import struct
import sys
from pathlib import Path

import torch

'''

CALL = '''
def call(t, device, real):
    """The call: `t` has its tensors, `real` changes a dtype argument where the call is made in float64."""
    return {expression}


OUTPUTS = {outputs}
'''

REST = '''
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": getattr(torch, "float8_e4m3fn", None), "F8_E5M2": getattr(torch, "float8_e5m2", None),
    "C64": torch.complex64, "U16": getattr(torch, "uint16", None), "U32": getattr(torch, "uint32", None),
    "U64": getattr(torch, "uint64", None),
}
STEP = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def read(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, about in json.loads(data[8 : 8 + length]).items():
        start, end = (8 + length + place for place in about["data_offsets"])
        raw = torch.frombuffer(bytearray(data[start:end]) or bytearray(8), dtype=torch.uint8)[: end - start]
        found[name] = raw.clone().view(DTYPES[about["dtype"]]).reshape(about["shape"])
    return found


def laid_out(tensors):
    """In the memory layout of the recorded run."""
    for name, stride in STRIDES.items():
        room = torch.empty_strided(tensors[name].shape, stride, dtype=tensors[name].dtype)
        tensors[name] = room.copy_(tensors[name])
    return tensors


def devices():
    found = ["cpu"]
    for kind in ("cuda", "npu", "xpu", "mps"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found.append(kind)
    return found


def results(found, t):
    if found is None:
        found = [t[name] for name in FIRST]
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    flat = []
    for item in found:
        flat += item if isinstance(item, (list, tuple)) else [item]
    return [flat[place] if place < len(flat) else None for place in OUTPUTS]


def run(tensors, device, wide=False):
    def change(tensor):
        copy = tensor.double() if wide and tensor.is_floating_point() else tensor.clone()
        return copy.to(device)

    t = {name: change(tensor) for name, tensor in tensors.items()}
    with torch.no_grad():
        found = call(t, device, lambda dtype: torch.float64 if wide and dtype.is_floating_point else dtype)
    return [item.detach().cpu() if isinstance(item, torch.Tensor) else item for item in results(found, t)]


def row(name, found, expected):
    if found.shape != expected.shape:
        return f"  {name:<20} shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not found.numel():
        return f"  {name:<20} has no elements"
    if not found.is_floating_point():
        return f"  {name:<20} {int((found != expected.to(found.dtype)).sum())} of {found.numel()} elements differ"
    error = (found.double() - expected.double()).abs()
    error[(found.double() == expected.double()) | (found.isnan() & expected.isnan())] = 0
    finite = error[error.isfinite()]
    lost = int((~found.isfinite() & expected.isfinite()).sum())
    size = expected.double()[expected.isfinite()].norm()
    flat = int(error.nan_to_num(float("inf")).argmax())
    place = []
    for length in reversed(error.shape):
        flat, index = divmod(flat, length)
        place.insert(0, index)
    largest = float(finite.max()) if finite.numel() else 0.0
    relative = float(finite.norm() / size) if size > 0 else float(finite.norm())
    steps = relative / STEP[found.dtype] if found.dtype in STEP else float("nan")
    return f"  {name:<20} {largest:>12.4g} {relative:>12.4g} {steps:>10.3g} {lost:>8}   {place}"


def main():
    everything = read(Path(__file__).with_name("tensors.safetensors"))
    inputs = laid_out({name: tensor for name, tensor in everything.items() if name.startswith("input.")})
    recorded = [everything.get(f"recorded.{place}") for place in range(len(OUTPUTS))]
    expected = [everything.get(f"expected.{place}") for place in range(len(OUTPUTS))]
    ways = {"recorded": recorded}
    for device in devices():
        try:
            ways[f"run on {device}"] = run(inputs, device)
        except Exception as error:
            print(f"not run on {device}: {type(error).__name__}: {error}")
    try:
        ways["float64 on cpu"] = run(inputs, "cpu", wide=True)
    except Exception as error:
        print(f"torch has no float64 form of it ({type(error).__name__}); the expected values in the file are used")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {', '.join(devices())}")
    for place in range(len(OUTPUTS)):
        if expected[place] is None:
            continue
        print(f"\\noutput {place}  {tuple(recorded[place].shape)} {recorded[place].dtype}, against float64")
        print(f"  {'':<20} {'max error':>12} {'relative':>12} {'in eps':>10} {'not fin.':>8}   worst at")
        for name, found in ways.items():
            if isinstance(found[place], torch.Tensor):
                print(row(name, found[place], expected[place]))


if __name__ == "__main__":
    main()
'''
