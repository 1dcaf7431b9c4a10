"""`ulpscope replay` and `ulpscope repro` on dumps with a fault planted by a dispatch mode of our own."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ulpscope
from ulpscope.cli.main import main
from ulpscope.store.files.safetensors import Stored, write_safetensors


class Tail(TorchDispatchMode):
    """The last four columns of the second product are those of the first four."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.count += 1
            if self.count == 2:
                return torch.cat([result[:, :-4], result[:, :4]], 1)
        return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 32))
    x = torch.randn(16, 32)
    with Tail(), ulpscope.Capture(folder / "a", model=model, level="kernel", tensors=True):
        loss = nn.functional.mse_loss(model(x)[:, 1:], x[:, 1:])
        loss.backward()
        x.add_(1.0, alpha=0.5)
        torch._foreach_mul_([torch.ones(3), x], 2.0)
        torch.zeros(0, 3).add(x[:1, :3].sum().item())
    return folder / "a"


def ulp(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0), capsys.readouterr().out


GOOD = [
    "Aten.addmm.default.0.forward",
    "Functional.linear.0.forward",
    "Functional.layer_norm.0.forward",
    "Functional.gelu.0.forward",
    "Functional.mse_loss.0.forward",
    "Tensor.__getitem__.0.forward",
    "Tensor.add_.0.forward",
    "Aten.mm.default.0.backward",
    "Aten.gelu_backward.default.0.backward",
    "Aten._foreach_mul_.Scalar.0.forward",
]
EMPTY = ["Torch.zeros.0.forward", "Tensor.item.0.forward"]


@pytest.mark.parametrize("call", GOOD)
def test_a_correct_call_is_within_rounding_and_gives_the_same_bits_again(
    run: Path, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    code, text = ulp(capsys, "replay", str(run), call, "--format", "json")
    found = json.loads(text)
    assert (code, found["same_bits"]) == (0, True)
    assert found["verdict"] in ("within rounding", "identical")
    assert [way["way"] for way in found["ways"]] == ["recorded", "again on cpu", "as float64"]
    rms = {way["way"]: way["outputs"][0]["rms"] for way in found["ways"]}
    assert rms["as float64"] <= rms["recorded"]


@pytest.mark.parametrize("call", EMPTY)
def test_a_call_without_elements_is_repeated_too(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    code, text = ulp(capsys, "replay", str(run), call, "--format", "json")
    assert (code, json.loads(text)["same_bits"]) == (0, True)
    assert ulp(capsys, "repro", str(run), call, "-o", str(tmp_path / "r"))[0] == 0
    runpy.run_path(str(tmp_path / "r" / "repro.py"), run_name="__main__")


@pytest.mark.parametrize("call", ["Aten.addmm.default.1.forward", "Functional.linear.1.forward"])
def test_a_wrong_call_is_named_with_its_pattern_and_is_right_here(
    run: Path, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    code, text = ulp(capsys, "replay", str(run), call)
    assert code == 1
    assert "verdict     introduced" in text
    assert "pattern     tail: only the end: dimension 1 [28:32]" in text
    assert "run again on cpu it is right" in text


def test_another_precision_is_scored_as_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ulp(capsys, "replay", str(run), "Aten.addmm.default.0.forward", "--as", "bf16", "--format", "json")
    way = json.loads(text)["ways"][2]
    assert (code, way["way"], way["verdict"]) == (0, "as bfloat16", "introduced")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("Functional.dropout.0.forward", "it draws random numbers"),
        ("Functional.linear.0.backward", "name a kernel below it"),
        ("Aten.t.default.0.forward", "it is a view, which computes nothing"),
        ("Functional.linear.7.forward", "has no call Functional.linear.7.forward"),
    ],
)
def test_what_cannot_be_run_again_says_why(run: Path, capsys: pytest.CaptureFixture[str], call: str, why: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run), call])
    assert ended.value.code == 3
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "call",
    [
        "Aten.addmm.default.1.forward",
        "Functional.linear.1.forward",
        "Tensor.__getitem__.0.forward",
        "Aten._foreach_mul_.Scalar.0.forward",
        "Aten.native_layer_norm.default.0.forward",
    ],
)
def test_the_script_runs_with_torch_alone_and_shows_the_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    folder = tmp_path / "report"
    assert ulp(capsys, "repro", str(run), call, "-o", str(folder))[0] == 0
    alone = "import sys; sys.modules['ulpscope'] = sys.modules['safetensors'] = sys.modules['numpy'] = None; "
    start = f"{alone}import runpy; runpy.run_path({str(folder / 'repro.py')!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = {line[2:22].strip(): line[22:].split() for line in done.stdout.splitlines() if line.startswith("  ")}
    assert rows.keys() >= {"recorded", "run on cpu", "float64 on cpu"}, done.stdout
    assert float(rows["float64 on cpu"][0]) == 0
    assert float(rows["run on cpu"][0]) < 1e-6
    wrong = call in ("Aten.addmm.default.1.forward", "Functional.linear.1.forward")
    assert (float(rows["recorded"][0]) > 0.1) is wrong
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert (call in page, torch.__version__ in page, ("introduced" in page) is wrong) == (True, True, True)
    assert ulp(capsys, "repro", str(run), call, "-o", str(folder))[0] == 2


def test_the_tensors_are_readable_by_the_package_of_that_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    ulp(capsys, "repro", str(run), "Aten.addmm.default.1.forward", "-o", str(tmp_path / "r"))
    found: dict[str, Tensor] = safetensors.load_file(tmp_path / "r" / "tensors.safetensors")
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        "input.0": (torch.float32, (32,)),
        "input.1": (torch.float32, (16, 32)),
        "input.2": (torch.float32, (32, 32)),
        "recorded.0": (torch.float32, (16, 32)),
        "expected.0": (torch.float64, (16, 32)),
    }
    product = torch.addmm(*(found[f"input.{place}"].double() for place in range(3)))
    torch.testing.assert_close(product, found["expected.0"], rtol=1e-14, atol=1e-14)
    assert torch.equal(found["recorded.0"][:, -4:], found["recorded.0"][:, :4])


def test_an_element_type_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ulpscope.DumpError, match="complex128"):
        write_safetensors(tmp_path / "x", {"x": Stored("complex128", (1,), bytes(16))})


def trained(folder: Path, factor: float, number: int) -> Path:
    """Two steps of a small model; one product of the first step, forward or backward, is scaled."""

    class Scale(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
                self.count += 1
                return result * factor if self.count == number else result
            return result

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 16)
    with Scale(), ulpscope.Capture(folder, model=model, level="kernel", tensors=True) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
            capture.step()
    return folder


def test_the_faulty_call_explains_the_loss_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(trained(tmp_path / "a", 1.0, 0)), str(trained(tmp_path / "b", 1.01, 2))]
    code, text = ulp(capsys, "blame", *runs, "--format", "json")
    found = json.loads(text)["attribution"]
    assert (code, found["step"], found["first_order"], found["without_gradient"]) == (1, 0, True, 0)
    assert found["explained_share"] == pytest.approx(1, abs=0.01)
    assert (found["shares"][0]["call"], found["shares"][0]["module"]) == ("Functional.linear.1.forward", "2")
    assert found["shares"][0]["share"] == pytest.approx(1, abs=0.05)
    assert json.loads(text)["next"][0].startswith(f"ulpscope replay {runs[1]} Aten.addmm.default.1.forward --step 0")


def test_a_wrong_gradient_reaches_the_loss_through_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(trained(tmp_path / "a", 1.0, 0)), str(trained(tmp_path / "b", 1.5, 4))]
    found = json.loads(ulp(capsys, "blame", *runs, "--format", "json")[1])["attribution"]
    assert (found["step"], found["first_order"]) == (1, True)
    assert found["of_weights"] == pytest.approx(found["loss"]["gap"], rel=0.05)
