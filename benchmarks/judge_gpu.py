"""The judge on a CUDA device: training steps judged by their own replay and beside the CPU's, clean and with one injected fault.

    python benchmarks/judge_gpu.py [--device cpu] [--cases bf16] [--json out.json]

A row is right when a clean run has no culprit, and a faulty one the very call that was made wrong. The fault is in a mode
outside of the ledger, so that the ledger sees what "the device" computed. Exit status 1 on any wrong row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ulpscope
from ulpscope.analyze.ledger import Finding, judge
from ulpscope.analyze.limits import limit
from ulpscope.store.ledger_file import Row, find_ledgers, read_ledger

Change = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]
Called = tuple[str, str, int]  # overload, dtypes of its floats, how many there were before it
LAYERS, HIDDEN, INNER, VOCABULARY, TOKENS = 4, 256, 704, 1024, 96
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def scaled(found: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """All results 1 % too large."""
    return (found.double() * 1.01).to(found.dtype)


def short(found: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """A block of 64 by 64 that lost the first eighth of its terms."""
    a, b = args[-2][..., :64, :], args[-1][..., :64]
    lost = max(1, a.shape[-1] // 8)
    changed = found.clone()
    changed[..., :64, :64] = (a[..., lost:].double() @ b[..., lost:, :].double()).to(found.dtype)
    return changed


def toward_zero(found: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Rounded toward zero: less than a unit, but always the same way."""
    exact = args[-2].double() @ args[-1].double()
    nearest = exact.to(found.dtype)
    below = torch.where(nearest.double().abs() > exact.abs(), -1, 0)
    bits = torch.int32 if found.dtype is torch.float32 else torch.int16
    return (nearest.view(bits) + below.to(bits)).view(found.dtype)


@dataclass(frozen=True)
class Fault:
    """The number of the call among those of its overload that is changed, in forward and backward together."""

    overload: str
    number: int
    change: Change


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    optimizer: str
    model: str = "sdpa"  # a Llama with this attention, or one of the zoo
    autocast: bool = False
    fault: Fault | None = None
    beside_cpu: bool = True
    tf32: bool = False


# A Llama layer has seven products forward; numbers from 29 on (the head is 28) are in the backward pass.
FAULTS = {
    ("fp32", "sgd"): Fault("mm.default", 12, short),
    ("fp32", "adamw"): Fault("mm.default", 40, scaled),
    ("bf16", "sgd"): Fault("mm.default", 17, scaled),
    ("bf16", "adamw"): Fault("mm.default", 9, toward_zero),
    ("fp16", "sgd"): Fault("mm.default", 50, short),
    ("fp16", "adamw"): Fault("mm.default", 22, scaled),
}


def cases() -> Iterator[Case]:
    for (dtype, optimizer), fault in FAULTS.items():
        yield Case(f"{dtype} {optimizer}", dtype, optimizer)
        yield Case(f"{dtype} {optimizer} {fault.change.__name__}", dtype, optimizer, fault=fault)
    yield Case("fp32 fused adamw", "fp32", "fused adamw", beside_cpu=False)
    yield Case("bf16 fused adamw", "bf16", "fused adamw", beside_cpu=False)
    yield Case("bf16 eager attention", "bf16", "sgd", "eager")
    bmm = Fault("bmm.default", 6, scaled)
    yield Case("bf16 eager attention scaled", "bf16", "sgd", "eager", fault=bmm)
    yield Case("fp32 eager attention short", "fp32", "sgd", "eager", fault=replace(bmm, change=short))
    yield Case("autocast bf16 adamw", "fp32", "adamw", autocast=True)
    late = Fault("mm.default", 60, scaled)
    yield Case("autocast bf16 adamw scaled", "fp32", "adamw", autocast=True, fault=late)
    third = Fault("mm.default", 12, short)
    yield Case("tf32 sgd", "fp32", "sgd", tf32=True)
    yield Case("tf32 sgd short", "fp32", "sgd", tf32=True, fault=third)
    for model in ZOO:
        for dtype in DTYPES:
            yield Case(f"{dtype} {model}", dtype, "adamw", model)
    yield Case("tf32 convolutions", "fp32", "sgd", "convolutions", tf32=True)
    one = Fault("convolution.default", 1, scaled)
    yield Case("tf32 convolutions scaled", "fp32", "sgd", "convolutions", tf32=True, fault=one)
    yield Case("bf16 sequences scaled", "bf16", "sgd", "sequences", fault=Fault("addmm.default", 3, scaled))


class Convolutions(torch.nn.Module):
    """Convolutions of all kinds, batch, group and instance norm, pooling, upsampling, a loss with smoothed labels."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 64, 1, stride=2),
            nn.BatchNorm2d(64), nn.GELU(), nn.ConvTranspose2d(64, 32, 2, 2), nn.InstanceNorm2d(32, affine=True), nn.Mish(),
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(32, 64, 5, padding=2), nn.Hardswish(),
            nn.AdaptiveAvgPool2d(4), nn.Dropout2d(0.1), nn.Flatten(), nn.Linear(1024, 128), nn.PReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        dtype = next(self.parameters()).dtype
        images = torch.randn(8, 3, 32, 32, generator=generator).to(tokens.device, dtype)
        return torch.nn.functional.cross_entropy(self.body(images), tokens[0, :8] % 10, label_smoothing=0.1)


class Sequences(torch.nn.Module):
    """A transformer encoder with dropout and a mask, a recurrent layer, weighted classes, a clipped scale."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.words = nn.Embedding(VOCABULARY, 128, padding_idx=0)
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.1, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rnn = nn.LSTM(128, 64, 2, batch_first=True, bidirectional=True)
        self.norm = nn.RMSNorm(128)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(128, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            TOKENS, device=tokens.device, dtype=next(self.parameters()).dtype
        )
        hidden = self.encoder(self.words(tokens), mask=mask)
        hidden = self.norm(hidden + self.rnn(hidden)[0]) * self.scale.exp().clamp(max=100)
        logits = self.head(hidden).float().flatten(0, 1)
        weight = torch.linspace(0.5, 1.5, 64, device=tokens.device)
        return torch.nn.functional.cross_entropy(logits, tokens.flatten() % 64, weight=weight, ignore_index=3)


ZOO = {"convolutions": Convolutions, "sequences": Sequences}


class Simulated(TorchDispatchMode):
    """Counts calls as the ledger does, keeps their shapes, and changes the result of one."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self._fault = fault
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seen = 0
        self.shapes: dict[Called, str] = {}
        self.changed: Called | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        dtypes = ",".join(str(leaf.dtype)[6:] for leaf in tensors if leaf.is_floating_point())
        op = f"{func._schema.name.replace('::', '.')}.{func._overloadname}"
        called = (op, dtypes, self._counts[op, dtypes])
        self._counts[op, dtypes] += 1
        self.shapes[called] = "  ".join(f"{tuple(leaf.shape)}/{tuple(leaf.stride())}" for leaf in tensors[:8])
        fault = self._fault
        if fault is not None and op == f"aten.{fault.overload}":
            self._seen += 1
            if self._seen == fault.number + 1:
                self.changed = called
                return fault.change(result, args)
        return result


@dataclass(frozen=True)
class Recorded:
    rows: list[Row]
    shapes: dict[Called, str]
    changed: Called | None
    seconds: float
    bare: float
    notes: list[str]


def record(case: Case, device: str, folder: Path) -> Recorded:
    torch.manual_seed(0)
    model = make_model(case).to(DTYPES[case.dtype]).to(device)
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS)).to(device)
    optimizer = make_optimizer(case, model)
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = (
        "tf32" if case.tf32 else "ieee"
    )

    def step() -> None:
        kind = torch.device(device).type
        low = torch.autocast(kind, torch.bfloat16) if case.autocast else contextlib.nullcontext()
        with low:
            loss = model(tokens) if case.model in ZOO else model(input_ids=tokens, labels=tokens).loss
        (loss * 256 if case.dtype == "fp16" else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()

    simulated = Simulated(case.fault)
    began = time.perf_counter()
    with simulated, ulpscope.ledger(folder, model=model) as ledger:
        step()
    synchronize(device)
    judged = time.perf_counter()
    step()
    synchronize(device)
    rows = [row for path in find_ledgers(folder) for row in read_ledger(path)[1]]
    times = judged - began, time.perf_counter() - judged
    return Recorded(rows, simulated.shapes, simulated.changed, *times, ledger.notes)


def make_model(case: Case) -> torch.nn.Module:
    if case.model in ZOO:
        return ZOO[case.model]()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=512, attn_implementation=case.model,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    # The usual epsilon is zero in float16.
    eps = 1e-4 if case.dtype == "fp16" else 1e-8
    fused = case.optimizer.startswith("fused") or None
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps, weight_decay=0.1, fused=fused)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


class Table:
    """Rows as they come; the evidence below every wrong one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        print(
            "| case | judged | expected | verdict | first named call | | calls | not judged | step | ledger | judge |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)

    def add(self, case: Case, how: str, target: Recorded, reference: Recorded | None) -> None:
        began = time.perf_counter()
        judgement = judge(target.rows, None if reference is None else reference.rows)
        seconds = time.perf_counter() - began
        first, expected = judgement.first, target.changed
        named = None if first is None else (first.row.op, first.row.dtypes, first.row.index)
        if named == expected:
            result = "ok"
        else:
            result = "false alarm" if expected is None else "missed" if named is None else "wrong call"
        if case.fault is not None and expected is None:
            result = "no such call"
        row = {
            "case": case.name,
            "judged": how,
            "expected": shown(expected),
            "verdict": "nothing is wrong" if first is None else first.verdict.value,
            "first": "-"
            if first is None
            else f"{first.row.module or first.row.param} {shown(named)} {first.row.phase}",
            "result": result,
            "calls": len(target.rows),
            "unknown": sum(judgement.unknown.values()),
            "step_s": round(target.bare, 3),
            "ledger_s": round(target.seconds, 1),
            "judge_s": round(seconds, 1),
        }
        self.rows.append(row)
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
        if result != "ok":
            self._evidence(judgement.findings, target, reference)
        for why, count in sorted(judgement.unknown.items()):
            print(f"      not judged {count}x {why}", flush=True)
        for note in target.notes[:5]:
            print(f"      note {note}", flush=True)

    def _evidence(self, findings: tuple[Finding, ...], target: Recorded, reference: Recorded | None) -> None:
        print(f"      {len(findings)} findings")
        named = [finding.row for finding in findings[:6]]
        named += [row for row in target.rows if (row.op, row.dtypes, row.index) == target.changed and row not in named]
        for finding in findings[:6]:
            print(f"      - {finding.verdict.value}, excess {finding.excess:.3g}: {finding.why}")
        for row in named:
            where = f"{row.module or row.param} {row.api} {row.phase} seq {row.seq}"
            print(f"      {row.op} #{row.index} {row.kind} [{row.dtypes[:80]}] in {where}")
            print(f"        operands {target.shapes.get((row.op, row.dtypes, row.index), '?')}; scalars {row.scalars}")
            for measure in row.measures[:3]:
                print(f"        {limit(row, measure)} {json.dumps(asdict(measure), default=str)[:900]}")
            alike = [each for each in target.rows if (each.op, each.phase) == (row.op, row.phase)]
            others = [f"{m.rms:.2g}/{m.worst:.2g}" for each in alike for m in each.measures[:1]]
            print(f"        rms/worst of the {len(alike)} calls of this kernel: {' '.join(others[:24])}")
            for other in reference.rows if reference is not None else ():
                if (other.op, other.module, other.param, other.phase) == (row.op, row.module, row.param, row.phase):
                    print(f"        reference: {json.dumps(asdict(other), default=str)[:700]}")
                    break
        sys.stdout.flush()


def shown(called: Called | None) -> str:
    return "-" if called is None else f"{called[0]} #{called[2]}"


def margins(runs: list[Recorded]) -> None:
    """How near clean calls come to their limits: the kernels above half of one."""
    nearest: defaultdict[tuple[str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for run in runs:
        for row in run.rows:
            for measure in row.measures:
                bound = limit(row, measure)
                rms, worst = nearest[row.op, measure.dtype]
                nearest[row.op, measure.dtype] = (
                    max(rms, measure.rms / bound.rms),
                    max(worst, measure.worst / bound.worst),
                )
    print("\nnear the limit in clean runs (share of it: root mean square, worst element)")
    for (op, dtype), (rms, worst) in sorted(nearest.items(), key=lambda item: -max(item[1])):
        if max(rms, worst) > 0.5:
            print(f"  {op:55s} {dtype:9s} {rms:5.2f} {worst:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(min(8, torch.get_num_threads()))
    chosen = [case for case in cases() if options.cases in case.name]
    began = time.perf_counter()
    table, clean, references = Table(), [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, case in enumerate(chosen):
            target = record(case, options.device, Path(temporary) / str(number))
            if case.fault is None:
                clean.append(target)
            table.add(case, options.device, target, None)
            if not case.beside_cpu:
                continue
            plain = replace(case, name="", fault=None)
            if plain not in references:
                references[plain] = record(plain, "cpu", Path(temporary) / f"{number}cpu")
                if options.device != "cpu":
                    table.add(plain, "cpu", references[plain], None)
            table.add(case, f"cpu -> {options.device}", target, references[plain])
    margins(clean)
    wrong = [row for row in table.rows if row["result"] != "ok"]
    print(f"\n{len(table.rows)} rows, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table.rows, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
