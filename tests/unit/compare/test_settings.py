"""Which settings of two runs differ, in words, and what they explain."""

from __future__ import annotations

from typing import Any

from ulpscope.compare.settings import SettingDifference, manifest_differences, setting_differences
from ulpscope.model.records import Manifest

PRODUCTS = {"cuda matmul": "ieee", "cuda conv": "tf32", "cuda rnn": "ieee", "cpu matmul": "ieee", "cpu conv": "ieee"}


def manifest(flags: dict[str, Any], **environment: Any) -> Manifest:
    return Manifest(2, "pytorch", "op", 0, 0, 1, "complete", {}, {"flags": flags, **environment})


def only(found: list[SettingDifference]) -> SettingDifference:
    (one,) = found
    return one


def test_equal_settings_say_nothing_on_the_same_device() -> None:
    here = manifest({"float32_products": PRODUCTS, "num_threads": 2, "deterministic_algorithms": False})
    assert setting_differences(here, here) == []
    assert setting_differences(here, here, devices=({"cuda"}, {"cuda"})) == []


def test_equal_settings_differ_across_devices_by_what_each_device_does() -> None:
    here = manifest({"float32_products": PRODUCTS, "bf16_reduced_precision_reduction": "True"})
    products, reductions = sorted(
        setting_differences(here, here, devices=({"cpu"}, {"cuda"})), key=lambda one: one.error or 0
    )
    assert (products.name, products.reference, products.target) == ("float32_products.conv", "ieee", "tf32")
    assert products.operators == {"conv"}
    assert products.dtypes == {"torch.float32"}
    assert products.error == 2**-10
    assert products.words == (
        "convolutions of float32 may run in full float32 on cpu in the reference, in TF32 on cuda in the target: "
        "errors to 0.001 of what is multiplied are that"
    )
    assert (reductions.reference, reductions.target, reductions.error) == ("off", "on", 2**-7)


def test_a_setting_that_one_side_does_not_know_is_no_difference() -> None:
    old, new = manifest({"num_threads": 2}), manifest({"num_threads": 2, "flush_denormals": True})
    assert setting_differences(old, new) == []
    assert setting_differences(manifest({"nnpack": "unknown (AttributeError)"}), manifest({"nnpack": True})) == []
    assert (
        list(manifest_differences(manifest({"nnpack": "unknown (AttributeError)"}), manifest({"nnpack": True}))) == []
    )
    assert setting_differences(manifest({}), manifest({"float32_products": PRODUCTS})) == []


def test_a_setting_of_a_device_that_neither_used_is_no_difference() -> None:
    left, right = manifest({"cudnn_benchmark": False}), manifest({"cudnn_benchmark": True})
    assert only(setting_differences(left, right)).name == "cudnn_benchmark"
    assert setting_differences(left, right, devices=({"cpu"}, {"cpu"})) == []


def test_autocast_and_flushing_are_said() -> None:
    left, right = (
        manifest({"autocast": {}, "flush_denormals": False}),
        manifest({"autocast": {"cpu": "torch.bfloat16"}, "flush_denormals": True}),
    )
    told = {each.name: each.words for each in setting_differences(left, right)}
    assert told["autocast"] == (
        "autocast around the first forward: off in the reference, cpu: torch.bfloat16 in the target (results are rounded to its dtype)"
    )
    assert told["flush_denormals"].startswith(
        "flushing of denormal numbers on the CPU: off in the reference, on in the target"
    )


def test_a_setting_that_changed_within_the_step_says_so() -> None:
    left = manifest({"num_threads": 2})
    right = manifest({"num_threads": 2}, flags_at_end={"num_threads": 8})
    assert only(setting_differences(left, right)).target == "2, 8 when the step ended"


def test_a_product_that_changed_within_the_step_counts_as_the_coarser() -> None:
    left = manifest({"float32_products": {"cpu matmul": "ieee"}})
    right = manifest(
        {"float32_products": {"cpu matmul": "ieee"}}, flags_at_end={"float32_products": {"cpu matmul": "bf16"}}
    )
    assert only(setting_differences(left, right)).error == 2**-7


def test_tf32_that_a_variable_forbids_is_none() -> None:
    here = manifest({"float32_products": PRODUCTS})
    there = manifest({"float32_products": {**PRODUCTS, "cuda matmul": "tf32"}}, variables={"NVIDIA_TF32_OVERRIDE": "0"})
    assert [each.name for each in setting_differences(here, there)] == ["float32_products.conv"]
    assert setting_differences(there, there, devices=({"cpu"}, {"cuda"})) == []
