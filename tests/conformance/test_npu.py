"""Rows of the seeds' feature list about NPUs: custom operators and the vendor's kernel dump, on the stand-in device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from device.fakenpu import run
from ulpscope.cli.capture import capture
from ulpscope.frameworks.torch.npu import acl_problems
from ulpscope.model.errors import ConfigError
from ulpscope.model.options import capture_config

# Seed 000 lists 52; npu_roi_align is there twice.
OPERATORS = [
    "one_", "npu_sort_v2", "npu_transpose", "npu_broadcast", "npu_dtype_cast", "empty_with_format", "npu_one_hot",
    "npu_stride_add", "npu_ps_roi_pooling", "npu_roi_align", "npu_nms_v4", "npu_iou", "npu_nms_with_mask", "npu_pad",
    "npu_bounding_box_encode", "npu_bounding_box_decode", "npu_batch_nms", "npu_slice", "_npu_dropout",
    "npu_indexing", "npu_ifmr", "npu_max", "npu_scatter", "npu_layer_norm_eval", "npu_alloc_float_status",
    "npu_get_float_status", "npu_clear_float_status", "npu_confusion_transpose", "npu_bmmV2", "fast_gelu",
    "npu_sub_sample", "npu_deformable_conv2d", "npu_mish", "npu_anchor_response_flags", "npu_yolo_boxes_encode",
    "npu_grid_assign_positive", "npu_normalize_batch", "npu_masked_fill_range", "npu_linear", "npu_bert_apply_adam",
    "npu_giou", "npu_ciou", "npu_diou", "npu_sign_bits_pack", "npu_sign_bits_unpack", "npu_flash_attention",
    "npu_scaled_masked_softmax", "npu_rotary_mul", "npu_roi_alignbk", "npu_ptiou", "npu_fusion_attention",
]  # fmt: skip

EVERY_OPERATOR = """
import json, sys, torch, ulpscope
library = torch.library.Library("npu", "DEF")
for name in sys.argv[2:]:
    writes = name.endswith("_")
    library.define(f"{name}(Tensor(a!) x) -> Tensor(a!)" if writes else f"{name}(Tensor x) -> Tensor")
    library.impl(name, (lambda x: x.fill_(1)) if writes else (lambda x: x * 2), "CPU")
with ulpscope.capture(sys.argv[1]):
    for name in sys.argv[2:]:
        getattr(torch.ops.npu, name)(torch.ones(1))
dump = ulpscope.open_dump(sys.argv[1])
print(json.dumps({ulpscope.model.names.call_text(call.id): [len(call.values), call.values[0].stats.max]
                  for call in dump.calls() if call.id.kind != "Torch"}))
"""

CAPTURE = """
import json, pathlib, sys, torch, torch_npu, ulpscope
torch.set_num_threads(1)
def files(folder):
    return sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*") if path.is_file())
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("operators"))
    done = subprocess.run([sys.executable, "-c", EVERY_OPERATOR, folder, *OPERATORS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def acl(tmp_path: Path) -> Path:
    (tmp_path / "output").mkdir()
    dump = {"dump_list": [], "dump_path": str(tmp_path / "output"), "dump_mode": "all", "dump_op_switch": "on"}
    path = tmp_path / "acl_config.json"
    path.write_text(json.dumps({"dump": dump}))
    return path


@pytest.mark.parametrize("name", OPERATORS)
def test_000_068_a_custom_operator_is_recorded_as_npu(recorded: dict[str, Any], name: str) -> None:
    assert recorded[f"NPU.{name}.0.forward"] == [2, 1.0]


def test_000_068_nothing_else_is_recorded_for_the_51_operators(recorded: dict[str, Any]) -> None:
    assert len(set(OPERATORS)) == len(recorded) == 51


def test_000_068_custom_operators_of_the_device_with_their_gradients(tmp_path: Path) -> None:
    names = run(
        CAPTURE
        + """
from torch.overrides import handle_torch_function, has_torch_function
def npu_swiglu(x):                       # torch_npu has operators in Python, too
    if has_torch_function((x,)):
        return handle_torch_function(npu_swiglu, (x,), x)
    return x.sigmoid()
npu_swiglu.__module__ = "torch_npu.function.npu_functional"
q = torch.ones(1, 1, 2, 2, device="npu", requires_grad=True)
with ulpscope.capture(sys.argv[1]):
    torch_npu.npu_fusion_attention(q, q, q, 1, "BNSD")[0].sum().backward()
    npu_swiglu(q)
names = [ulpscope.model.names.call_text(call.id) for call in ulpscope.open_dump(sys.argv[1]).calls()]
print(json.dumps([name for name in names if name.startswith("NPU")]))
""",
        tmp_path,
    )
    assert names == [
        "NPU.npu_fusion_attention.0.forward",
        "NPU.npu_fusion_attention_grad.0.forward",
        "NPU.npu_fusion_attention.0.backward",
        "NPU.npu_swiglu.0.forward",
    ]


GOOD = {"dump_list": [], "dump_path": ".", "dump_mode": "all", "dump_op_switch": "on"}


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("dump_list", [[], None], ["all", 3]),
        ("dump_path", ["."], ["no/such/folder", "", 3, None]),
        ("dump_mode", ["output", "input", "all", None], ["both", 1]),
        ("dump_op_switch", ["on", "off", None], ["yes", True]),
    ],
)
def test_000_080_081_082_083_keys_of_the_acl_config_are_checked(key: str, good: list[Any], bad: list[Any]) -> None:
    def problems(value: Any) -> list[str]:
        return acl_problems({"dump": {name: item for name, item in {**GOOD, key: value}.items() if item is not None}})

    assert [problems(value) for value in good] == [[]] * len(good)
    for value in bad:
        (problem,) = problems(value)
        assert problem.startswith(f"dump.{key}")


def test_002_104_the_example_of_the_seed_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump" / "output").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert acl_problems({"dump": {**GOOD, "dump_path": "./dump/output"}}) == []


def test_002_007_068_the_options_belong_to_kernels_of_one_call() -> None:
    with pytest.raises(ConfigError) as caught:
        capture_config({"acl_config": "a.json", "backward_input": "g.pt"})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["acl_config", "backward_input"]
    with pytest.raises(ConfigError, match="below: works at level kernel only"):
        capture_config({"acl_config": "a.json", "below": "Torch.mm.0.forward"})


def test_002_007_061_the_options_are_flags_of_the_command_line_too(tmp_path: Path, acl: Path) -> None:
    flags = [
        "-o",
        str(tmp_path / "run"),
        "--allow-empty",
        "--acl-config",
        str(acl),
        "--backward-input",
        "a.pt",
        "--",
        "true",
    ]
    done = CliRunner().invoke(capture, flags)
    assert isinstance(done.exception, ConfigError)
    assert {problem.partition(":")[0] for problem in done.exception.problems} == {"acl_config", "backward_input"}
    done = CliRunner().invoke(capture, ["--level", "kernel", "--below", "Torch.mul.0.backward", *flags])
    assert done.exit_code == 0, done.output


def test_002_061_the_gradient_files_are_read_at_the_start(tmp_path: Path, acl: Path) -> None:
    text = run(
        CAPTURE
        + """
try:
    ulpscope.Capture(sys.argv[1], level="kernel", below="Torch.mm.0.backward", acl_config=sys.argv[2],
                     backward_input=["missing.pt"]).start()
except ulpscope.model.errors.UlpscopeError as error:
    print(json.dumps(str(error)))
""",
        tmp_path / "run",
        acl,
    )
    assert "missing.pt" in text


def test_000_084_085_a_nested_call_is_dumped_once_in_the_layout_of_the_vendor(tmp_path: Path, acl: Path) -> None:
    """functional.batch_norm calls torch.batch_norm: the vendor's dump must not be initialised for both."""
    log, files = run(
        CAPTURE
        + """
x = torch.randn(2, 3).to("npu")
with ulpscope.capture(sys.argv[1], level="kernel", below="Functional.batch_norm.0.forward", acl_config=sys.argv[2]):
    torch.nn.functional.batch_norm(x, None, None, training=True)
print(json.dumps([[call.split()[0] for call in torch_npu.npu.dump_calls], files(sys.argv[3])]))
""",
        tmp_path / "run",
        acl,
        tmp_path / "output",
    )
    assert log == ["init_dump", "set_dump", "finalize_dump"]
    assert files
    assert all(re.fullmatch(r"\d{14}/0/0/(\w+)\.\1\.\d+\.0\.\d{16}", file) for file in files)


def test_002_105_108_109_forward_and_backward_kernels_of_one_api(tmp_path: Path, acl: Path) -> None:
    """The examples of the seed: forward by name alone; backward with the gradient that an earlier capture stored."""
    found = run(
        CAPTURE
        + """
def step(name, **options):
    x, y = (torch.full((2,), number, device="npu", requires_grad=True) for number in (3.0, 4.0))
    with ulpscope.capture(pathlib.Path(sys.argv[1]) / name, **options):
        (x * y).sum().backward()
    found = files(sys.argv[3])
    return x.grad.tolist(), [path.split("/")[-1].split(".")[0] for path in found]

kernel = dict(level="kernel", acl_config=sys.argv[2])
step("whole", tensors=True)
dump = ulpscope.open_dump(pathlib.Path(sys.argv[1]) / "whole")
(call,) = [call for call in dump.calls() if ulpscope.model.names.call_text(call.id) == "Tensor.__mul__.0.backward"]
gradient = pathlib.Path(sys.argv[1]) / "Tensor.__mul__.0.backward.input.0.pt"
torch.save(torch.from_numpy(dump.load(call.values[0]).copy()), gradient)
forward = step("forward", below="Tensor.__mul__.0.forward", **kernel)
for path in files(sys.argv[3]):
    (pathlib.Path(sys.argv[3]) / path).unlink()
backward = step("backward", below="Tensor.__mul__.0.backward", backward_input=[gradient], **kernel)
print(json.dumps([forward, backward]))
""",
        tmp_path,
        acl,
        tmp_path / "output",
    )
    assert found == [[[4.0, 4.0], ["Mul"]], [[4.0, 4.0], ["Mul", "Mul"]]]
