"""Completeness, proven: every kernel of a recorded Llama step, run again from the dump alone, gives the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import ulpscope
from ulpscope.model.records import CallRecord, Role, Value
from ulpscope.store.dump import Dump


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_llama_step_is_reproduced_kernel_by_kernel(tmp_path: Path, dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    with ulpscope.capture(tmp_path, model=model, level="kernel", tensors=True):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    dump = ulpscope.open_dump(tmp_path)
    kernels = [call for call in dump.calls() if call.id.kind == "Aten"]
    replayed = [call for call in kernels if all(value.error is None for value in call.values)]
    assert len(kernels) > 500
    assert {call.id.phase.value for call in replayed} == {"forward", "backward"}
    unknown = {call.id.name for call in kernels} - {call.id.name for call in replayed}
    assert unknown <= {
        "empty.memory_format",
        "empty_like.default",
        "empty_strided.default",
        "new_empty_strided.default",
    }
    for call in replayed:
        check(dump, call)


def check(dump: Dump, call: CallRecord) -> None:
    name, _, overload = call.id.name.rpartition(".")
    kernel = getattr(getattr(torch.ops.aten, name), overload)
    args, kwargs = arguments(dump, call)
    with torch.no_grad():
        result = kernel(*args, **kwargs)
    if result is None:
        result = args[0]
    outputs = [value for value in call.values if value.slot.role is Role.OUTPUT]
    for value in outputs:
        found = result
        for step in value.slot.path if isinstance(result, list | tuple) else value.slot.path[1:]:
            found = found[step]
        if value.is_tensor:
            expected = tensor(dump, value)
            assert found.dtype == expected.dtype, call.id
            assert found.shape == expected.shape, call.id
            assert bits(found) == bits(expected), call.id
        else:
            assert found == value.scalar, call.id


def bits(found: torch.Tensor) -> bytes:
    return found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def arguments(dump: Dump, call: CallRecord) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call as they were, nested as they were."""
    tree: dict[Any, Any] = {}
    for value in call.values:
        if value.slot.role is not Role.INPUT:
            continue
        place = tree
        *above, last = value.slot.path
        for step in above:
            place = place.setdefault(step, {})
        place[last] = plain(dump, value)
    args = [listed(tree[place]) for place in sorted(key for key in tree if isinstance(key, int))]
    return args, {key: listed(item) for key, item in tree.items() if isinstance(key, str)}


def listed(item: Any) -> Any:
    return [listed(item[place]) for place in sorted(item)] if isinstance(item, dict) else item


def plain(dump: Dump, value: Value) -> Any:
    if value.is_tensor:
        return tensor(dump, value)
    if value.type in ("torch.dtype", "torch.layout", "torch.memory_format"):
        return getattr(torch, value.scalar.removeprefix("torch."))
    if value.type == "torch.device":
        return torch.device(value.scalar)
    if value.type == "float" and isinstance(value.scalar, str):
        return float(value.scalar)
    return value.scalar


def tensor(dump: Dump, value: Value) -> torch.Tensor:
    raw = bytearray(np.ascontiguousarray(dump.load_bits(value)).tobytes())
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    dense = flat.view(getattr(torch, value.dtype.removeprefix("torch."))).reshape(value.shape)
    narrow = dense[tuple(slice(0, 1) if not step else slice(None) for step in value.stride)]  # an expanded dimension
    return torch.empty_strided(narrow.shape, value.stride, dtype=dense.dtype).copy_(narrow).expand(value.shape)
