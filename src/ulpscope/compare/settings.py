"""What two manifests say differently about where and how two runs ran, and which errors that explains.

A setting that only one manifest knows, or that a version could not tell, is no difference: nothing is known of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ulpscope.model.records import Manifest

_IGNORED = frozenset({"command", "time", "started", "host", "hostname", "pid", "path", "cwd"})


def manifest_differences(reference: Manifest, target: Manifest) -> Iterator[tuple[str, str, str]]:
    """Key, and what each side has there, of all that both tell and tell differently."""
    left = {**_flat(reference.environment), **_flat(reference.config, "option ")}
    right = {**_flat(target.environment), **_flat(target.config, "option ")}
    for key in sorted(left.keys() & right.keys()):
        known = left[key] != right[key] and not any(each.startswith(_UNKNOWN) for each in (left[key], right[key]))
        if known and key.rpartition(".")[2].removeprefix("option ") not in _IGNORED:
            yield key, left[key], right[key]


def _flat(content: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(content, dict):
        return {}
    found: dict[str, str] = {}
    for key, item in content.items():
        if isinstance(item, dict):
            found |= _flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(item)
    return found


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A precision setting that two runs had differently.

    `operators`: the kinds of calls whose results it changes, of `matmul`, `conv`, `rnn`, `attention`, `sum`, or `any`.
    `dtypes`: of which inputs, as `Value.dtype` has them; empty for all. `error`: by how much at most, of the sizes that a call multiplies and adds up; None
    where it only changes the order of sums, which is rounding in the call's own dtype. `words`: a sentence without a full stop."""

    name: str
    reference: str
    target: str
    words: str
    operators: frozenset[str]
    dtypes: frozenset[str] = frozenset()
    error: float | None = None


def setting_differences(
    reference: Manifest, target: Manifest, *, devices: tuple[Collection[str], Collection[str]] | None = None
) -> list[SettingDifference]:
    """The precision settings that differ, those with the largest errors first.

    `devices`: the kinds of devices (`cpu`, `cuda`) whose values each run has. With them, what a setting of one device does is held
    against what the other run's device does: products on `cuda` in TF32 against those on `cpu` in full float32. Without them, only
    settings that both manifests have and have differently are told, for whatever device."""
    sides = [
        _Side(each.environment, None if devices is None else devices[at]) for at, each in enumerate((reference, target))
    ]
    found = [*_products(*sides), *(each for row in _ROWS for each in _row(row, *sides))]
    return sorted(found, key=lambda each: -(each.error or 0.0))


def coarse_settings(reference: Manifest, target: Manifest) -> list[SettingDifference]:
    """Those that differ and make errors larger than rounding in a call's own dtype."""
    devices = tuple(_devices(each.environment) for each in (reference, target))
    found = setting_differences(reference, target, devices=(devices[0], devices[1]))
    return [
        each for each in found if each.error is not None and each.error > _DENORMAL and each.operators <= _PRODUCING
    ]


def _devices(environment: dict[str, Any]) -> frozenset[str]:
    told = environment.get("devices")
    cuda = isinstance(told, list) and any(each != "cpu" for each in told)
    return frozenset({"cpu", "cuda"} if cuda else {"cpu"})


_DENORMAL = 2.0**-64
_PRODUCING = frozenset({"matmul", "conv", "rnn", "attention"})
_UNKNOWN = "unknown ("
# A factor of a product is off by half a unit in the last of so many bits; there are two.
_PRODUCTS = {"ieee": 0.0, "tf32": 2 * 2.0**-11, "bf16": 2 * 2.0**-8}
_PRODUCT_NAMES = {"ieee": "full float32", "tf32": "TF32", "bf16": "bfloat16"}
_KINDS = {"matmul": "products of matrices", "conv": "convolutions", "rnn": "recurrent layers"}
_HALVES = frozenset({"torch.float16", "torch.bfloat16"})


class _Side:
    """The settings of one run."""

    def __init__(self, environment: dict[str, Any], devices: Collection[str] | None) -> None:
        flags, at_end = (environment.get(key) for key in ("flags", "flags_at_end"))
        self.flags: dict[str, Any] = flags if isinstance(flags, dict) else {}
        self.at_end: dict[str, Any] = at_end if isinstance(at_end, dict) else {}
        variables = environment.get("variables")
        self._variables: dict[str, Any] = variables if isinstance(variables, dict) else {}
        self.devices = devices

    def setting(self, name: str) -> str | None:
        """As a text, with what it had become at the end of the step; None where it is not known."""
        value = self.flags.get(name)
        if value is None or str(value).startswith(_UNKNOWN):
            return None
        text = _text(value)
        return f"{text}, {_text(self.at_end[name])} when the step ended" if name in self.at_end else text

    def product(self, device: str, kind: str) -> str | None:
        """What factors of float32 are rounded to there; the coarser where that changed within the step."""
        if device == "cuda" and self._variables.get("NVIDIA_TF32_OVERRIDE") == "0":
            return "ieee"
        told = [each.get("float32_products") for each in (self.flags, self.at_end)]
        found = [each.get(f"{device} {kind}") for each in told if isinstance(each, dict)]
        return max((each for each in found if each in _PRODUCTS), key=_PRODUCTS.__getitem__, default=None)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(item)}" for key, item in sorted(value.items())) or "off"
    return {"True": "on", "False": "off"}.get(str(value), str(value))


def _products(reference: _Side, target: _Side) -> Iterator[SettingDifference]:
    for kind, what in _KINDS.items():
        if reference.devices is None or target.devices is None:
            pairs = [(device, device) for device in ("cuda", "cpu")]
        else:
            pairs = [(left, right) for left in sorted(reference.devices) for right in sorted(target.devices)]
        told = set()
        for left, right in pairs:
            old, new = reference.product(left, kind), target.product(right, kind)
            if old is None or new is None or old == new or (old, new) in told:
                continue
            told.add((old, new))
            error = max(_PRODUCTS[old], _PRODUCTS[new])
            words = (
                f"{what} of float32 may run in {_PRODUCT_NAMES[old]} on {left} in the reference, in {_PRODUCT_NAMES[new]} on {right} "
                f"in the target: errors to {error:.1g} of what is multiplied are that"
            )
            operators = frozenset({kind, "attention"} if kind == "matmul" else {kind})
            yield SettingDifference(
                f"float32_products.{kind}", old, new, words, operators, frozenset({"torch.float32"}), error
            )


@dataclass(frozen=True, slots=True)
class _Row:
    """A setting: what it is called, what it changes, on which kind of device, and what a run without that device has."""

    name: str
    what: str
    does: str
    operators: frozenset[str]
    device: str = ""
    absent: str | None = None
    dtypes: frozenset[str] = frozenset()
    error: Callable[[str, str], float | None] = lambda left, right: None


def _of(*operators: str) -> frozenset[str]:
    return frozenset(operators)


_ORDER = "sums in another order"
_ROWS = (
    _Row("fp16_reduced_precision_reduction", "reductions of float16 products in float16", "parts of sums are rounded to float16",
         _of("matmul"), "cuda", "off", _of("torch.float16"), lambda left, right: 2.0**-10),
    _Row("bf16_reduced_precision_reduction", "reductions of bfloat16 products in bfloat16", "parts of sums are rounded to bfloat16",
         _of("matmul"), "cuda", "off", _of("torch.bfloat16"), lambda left, right: 2.0**-7),
    _Row("fp16_accumulation", "sums of float16 products in float16", "every sum is rounded to float16 as it grows",
         _of("matmul"), "cuda", "off", _of("torch.float16"), lambda left, right: 2.0**-8),
    _Row("sdpa_reduced_precision_reduction", "reductions of attention in half precision", "parts of sums are rounded to the inputs' dtype",
         _of("attention"), "cuda", "off", _HALVES, lambda left, right: 2.0**-7),
    _Row("cpu_fp16_reduced_precision_reduction", "reductions of float16 products in float16 on the CPU",
         "parts of sums are rounded to float16", _of("matmul"), "cpu", "off", _of("torch.float16"), lambda left, right: 2.0**-10),
    _Row("autocast", "autocast around the first forward", "results are rounded to its dtype", _of("any")),
    _Row("flush_denormals", "flushing of denormal numbers on the CPU", "numbers below the smallest normal one become 0", _of("any"),
         "cpu", "off", frozenset(), lambda left, right: 2.0**-126),
    _Row("default_dtype", "the default dtype", "what is made without a dtype has another", _of("any")),
    _Row("deterministic_algorithms", "deterministic algorithms", _ORDER, _of("any")),
    _Row("fill_uninitialized_memory", "filling of uninitialized memory", "what nobody has written has other values", _of("any")),
    _Row("cudnn_enabled", "cuDNN", "other kernels", _of("conv", "rnn", "attention"), "cuda"),
    _Row("cudnn_benchmark", "cuDNN's choice of kernels by trial", _ORDER, _of("conv", "rnn"), "cuda"),
    _Row("cudnn_deterministic", "cuDNN's deterministic kernels", _ORDER, _of("conv", "rnn"), "cuda"),
    _Row("sdpa", "the kernels allowed for attention", _ORDER, _of("attention")),
    _Row("attention_fastpath", "torch's fast path of attention layers", "other kernels", _of("attention")),
    _Row("blas", "the library for products of matrices", _ORDER, _of("matmul"), "cuda"),
    _Row("linalg", "the library for linear algebra", "other algorithms", _of("any"), "cuda"),
    _Row("mkldnn", "oneDNN", "other kernels", _of("matmul", "conv", "rnn"), "cpu"),
    _Row("mkldnn_deterministic", "oneDNN's deterministic kernels", _ORDER, _of("matmul", "conv", "rnn"), "cpu"),
    _Row("nnpack", "NNPACK", "other kernels", _of("conv"), "cpu"),
    _Row("opt_einsum", "einsum's choice of an order", _ORDER, _of("matmul")),
    _Row("quantized_engine", "the engine of quantized operators", "other kernels", _of("any"), "cpu"),
    _Row("cpu_capability", "the processor's instructions", _ORDER, _of("any"), "cpu"),
    _Row("num_threads", "the number of threads on the CPU", _ORDER, _of("any"), "cpu"),
)  # fmt: skip


def _row(row: _Row, reference: _Side, target: _Side) -> Iterator[SettingDifference]:
    """The difference in one setting, if there is one where it matters."""
    old, new = (_held(row, side) for side in (reference, target))
    if old is not None and new is not None and old != new:
        words = f"{row.what}: {old} in the reference, {new} in the target ({row.does})"
        yield SettingDifference(row.name, old, new, words, row.operators, row.dtypes, row.error(old, new))


def _held(row: _Row, side: _Side) -> str | None:
    if side.devices is not None and row.device and row.device not in side.devices:
        return row.absent
    return side.setting(row.name)
