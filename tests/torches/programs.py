"""`programs.py NAME [--tool ulpscope|msprobe] [--without torch.NAME ...]`: one small program, run bare, then recorded at each level, then bare
again, in one process.

Prints a line a level: `NAME LEVEL same|CHANGED|RAISED|REFUSED|... calls=N what`. Exit code 1 if a line is not `same`. Needs only torch, of
any version from 2.1 on, and what is tested. With `--without`, a name is deleted from torch before that is imported.
"""

import argparse
import json
import os
import pkgutil
import sys
import tempfile
import traceback

import torch
import torch.nn.functional as F
from torch import nn


def train(model, batch, steps=3, optimizer=None, autocast=None, scaler=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    facts = []
    for step in range(steps):
        optimizer.zero_grad()
        if autocast:
            with torch.autocast("cpu", dtype=autocast):
                loss = model(*batch(step)).float().square().mean()
        else:
            loss = model(*batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        facts.append(loss.detach().clone())
        yield
    yield facts + [p.detach().clone() for p in model.parameters()] + [b.detach().clone() for b in model.buffers()]


def rows(*shape):
    return lambda step: (torch.randn(*shape),)


class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, w))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(Double.apply(self.a(x)))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)


def mlp():
    yield from train(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), rows(4, 8))


def conv():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )
    yield from train(model, rows(4, 3, 8, 8), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def attention():
    yield from train(nn.Sequential(Attention(), Attention()), rows(2, 6, 16))


def lstm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.body(x)[0])

    yield from train(Net(), rows(2, 5, 8))


def encoder():
    yield from train(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), rows(2, 5, 16))


def encoder_eval():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    with torch.no_grad():
        out = [model(torch.randn(2, 5, 16)) for _ in range(2)]
    yield
    yield out


def custom():
    yield from train(Custom(), rows(4, 8))


def checkpointed():

    yield from train(Checkpointed(), rows(4, 8))


def autocast():
    yield from train(nn.Sequential(Attention(), nn.Linear(16, 4)), rows(2, 6, 16), autocast=torch.bfloat16)


def foreach():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    yield from train(model, rows(4, 8), optimizer=torch.optim.Adam(model.parameters(), foreach=True))


def functional():
    from torch.func import functional_call, grad, vmap

    model = nn.Linear(8, 4)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p, x):
        return functional_call(model, p, (x,)).square().sum()

    out = vmap(grad(loss), in_dims=(None, 0))(params, torch.randn(5, 8))
    yield
    yield list(out.values())


def hooks():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    seen = []
    model[0].register_forward_hook(lambda m, i, o: o * 1.5)
    model[2].register_full_backward_hook(lambda m, i, o: seen.append(o[0].sum()))
    model[0].weight.register_hook(lambda g: g * 2)
    for result in train(model, rows(4, 8)):
        yield result if result is None else result + seen


def views():
    x = torch.randn(6, 6, requires_grad=True)
    y = x.clone()
    y[1:3] += y[3:5].t().contiguous().t() * 2
    y.view(-1)[::7].mul_(0.5)
    y.index_put_((torch.tensor([0, 2]),), torch.ones(2, 6))
    y.scatter_add(0, torch.zeros(2, 6, dtype=torch.long), torch.randn(2, 6)).cumsum(0).square().sum().backward()
    yield
    yield [y.detach(), x.grad]


def double_backward():
    x = torch.randn(5, requires_grad=True)
    (g,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
    g.square().sum().backward()
    yield
    yield [x.grad]


def loader():
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.randn(12, 8))
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(data, batch_size=4, shuffle=True, num_workers=1):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        yield
    yield [p.detach().clone() for p in model.parameters()]


GRAPHS = []


def counting(graph, inputs):
    GRAPHS.append(graph)
    return graph.forward


def compiled():
    GRAPHS.clear()
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fast = torch.compile(model, backend=counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        fast(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        yield
    yield [p.detach().clone() for p in model.parameters()] + [torch.tensor(len(GRAPHS))]


def traced():
    from torch.fx import symbolic_trace

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    text = str(symbolic_trace(model).graph)
    script = torch.jit.trace(model, torch.randn(2, 8))
    yield
    yield [torch.tensor([ord(c) for c in text]), script(torch.randn(2, 8)).detach()]


def exported():
    from torch.export import export

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    program = export(model, (torch.randn(2, 8),))
    text = str(program.graph)
    yield
    yield [torch.tensor([ord(c) for c in text])]


def raising():
    model = nn.Linear(8, 4)
    for shape in ((2, 8), (2, 7), (2, 8)):
        try:
            model(torch.randn(*shape)).sum().backward()
        except RuntimeError as error:
            word = str(error)[:40]
        yield
    yield [model.weight.grad.clone(), torch.tensor([ord(c) for c in word])]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        ids = torch.randint(0, 64, (2, 12))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach().clone())
        yield
    yield losses + [p.detach().clone() for p in model.parameters()]


def generate():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config).eval()
    out = model.generate(torch.randint(0, 64, (1, 4)), max_new_tokens=4, do_sample=True, pad_token_id=0)
    yield
    yield [out]


def ddp():
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
            yield from train(model, rows(4, 8))
            x = torch.randn(4)
            dist.all_reduce(x)
        finally:
            dist.destroy_process_group()


PROGRAMS = (
    mlp,
    conv,
    attention,
    lstm,
    encoder,
    encoder_eval,
    custom,
    checkpointed,
    autocast,
    foreach,
    functional,
    hooks,
    views,
    double_backward,
    loader,
    compiled,
    traced,
    exported,
    raising,
    llama,
    generate,
    ddp,
)


def run(program, step=lambda: None):
    torch.manual_seed(0)
    result = None
    for result in program():
        if result is None:
            step()
    return result


def recorded(program, level, folder):
    import ulpscope

    with ulpscope.capture(folder, level=level) as capture:
        result = run(program, capture.step)
    dumps = [ulpscope.open_dump(path) for path in capture.dumps]
    lost = [dump.ending for dump in dumps if dump.ending != "complete"]
    return result, sum(len(dump) for dump in dumps), lost


def through_msprobe(program, level, folder):
    from msprobe.pytorch import PrecisionDebugger

    os.makedirs(folder)
    words = {
        "task": "statistics",
        "dump_path": folder + "/out",
        "rank": [],
        "step": [],
        "level": level,
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    }
    with open(folder + "/config.json", "w") as file:
        json.dump(words, file)
    debugger = PrecisionDebugger(config_path=folder + "/config.json")
    debugger.start()

    def step():
        debugger.stop()
        debugger.step()
        debugger.start()

    result = run(program, step)
    debugger.stop()
    calls = 0
    for at, _, files in os.walk(folder):
        if "dump.json" in files:
            with open(os.path.join(at, "dump.json")) as file:
                calls += len(json.load(file)["data"])
    return result, calls, []


def same(one, other):
    return len(one) == len(other) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=False)
    )


def without(path):
    """Deletes a name of torch, as a version does that never had it."""
    space, _, name = path.rpartition(".")
    found = pkgutil.resolve_name(space)
    delattr(next(each for each in getattr(found, "__mro__", (found,)) if name in vars(each)), name)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=[each.__name__ for each in PROGRAMS])
    parser.add_argument("--tool", choices=["ulpscope", "msprobe"], default="ulpscope")
    parser.add_argument("--without", action="append", default=[])
    words = parser.parse_args()
    torch.set_num_threads(1)
    program = {each.__name__: each for each in PROGRAMS}[words.program]
    for path in words.without:
        without(path)
    try:
        bare = run(program)
    except Exception as error:  # this torch or transformers cannot run it
        print(f"{words.program} bare cannot run here: {type(error).__name__}: {str(error)[:100]}")
        return 0
    return check(words.program, program, bare, words.tool)


LEVELS = {"ulpscope": ("module", "op", "mix", "kernel", "bare again"), "msprobe": ("mix", "bare again")}


def check(name, program, bare, tool, levels=None):
    bad = 0
    record = recorded if tool == "ulpscope" else through_msprobe
    with tempfile.TemporaryDirectory() as folder:
        for level in levels or LEVELS[tool]:
            calls, what, lost = 0, "", []
            try:
                if level == "bare again":
                    result = run(program)
                else:
                    result, calls, lost = record(program, level, os.path.join(folder, level))
                score = "same" if same(bare, result) else "CHANGED"
                if score == "same" and level not in ("bare again", "module") and not calls:
                    score = "NOTHING RECORDED"
                elif score == "same" and lost:
                    score, what = "INCOMPLETE", lost[0]
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                score = "REFUSED" if type(error).__name__ == "CaptureError" else "RAISED"
                what = f"{type(error).__name__}: {str(error)[:160]} ({place.filename.split('site-packages')[-1]}:{place.lineno})"
            bad += score not in ("same", "REFUSED")
            print(f"{name} {level} {score} calls={calls} {what}".rstrip(), flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
