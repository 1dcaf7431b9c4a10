"""What the settings of a run say of the precision of its products: a float32 convolution that ran in TF32 rounds as TF32 does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ulpscope.records import CallRecord, Manifest

_UNITS = {"tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Kinds of products as the settings name them, by the first part of a call's name.
_RNN = frozenset({"lstm", "gru", "rnn", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"})
_MATMUL = frozenset(
    ["linear", "matmul", "rmatmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "mv", "dot", "einsum", "bilinear", "tensordot",
     "chain_matmul", "scaled_dot_product_attention", "multi_head_attention_forward"]
)  # fmt: skip
_WORDS = {"conv": "convolutions", "matmul": "matrix products", "rnn": "recurrent layers"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Of each run, the round-off of products by device and kind: ("cuda", "conv"): 2**-11."""

    reference: Mapping[tuple[str, str], str]
    target: Mapping[tuple[str, str], str]

    @property
    def is_coarse(self) -> bool:
        return bool(self.reference or self.target)

    def explain(self, call: CallRecord | None, *, of_target: bool) -> tuple[float, str]:
        """The round-off of a call's products where it is coarser than its dtype, and why; 0 where it is not."""
        told = self.target if of_target else self.reference
        if call is None or not told:
            return 0.0, ""
        kind = _kind(call.id.name)
        if not kind:
            return 0.0, ""
        device = next((value.device.partition(":")[0] for value in call.values if value.device), "")
        way = told.get((device, kind), "")
        side = "target" if of_target else "reference"
        return _UNITS.get(way, 0.0), f"{_WORDS[kind]} ran in {way.upper()} in the {side}" if way else ""


def settings_of(reference: Manifest, target: Manifest) -> Settings:
    """The settings of two runs, as far as their manifests tell them."""
    return Settings(_products(reference.environment), _products(target.environment))


def _products(environment: Any) -> dict[tuple[str, str], str]:
    flags = environment.get("flags") if isinstance(environment, dict) else None
    told = flags.get("float32_products") if isinstance(flags, dict) else None
    devices = environment.get("devices") if told else None
    alone = isinstance(devices, list) and all(each == "cpu" for each in devices)
    found = {}
    for name, way in told.items() if isinstance(told, dict) else ():
        device, _, kind = str(name).partition(" ")
        if way in _UNITS and (device == "cpu" or not alone):
            found[device, kind] = str(way)
    return found


def _kind(name: str) -> str:
    plain = name.partition(".")[0].strip("_")
    if plain.startswith("conv"):
        return "conv"
    return "rnn" if plain in _RNN else "matmul" if plain in _MATMUL else ""
