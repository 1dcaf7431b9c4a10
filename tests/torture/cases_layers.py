"""Layers, optimizers and models that people train. Most are those of the integration tests, under the name of the case."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ulpscope
from integration import programs_layers as layers
from integration import programs_transformers as transformers
from integration.programs_layers import trained
from integration.runs import Program


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bag = nn.Embedding(20, 16), nn.EmbeddingBag(20, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, places: Tensor) -> Tensor:
        data = self.embed(places)
        out, _ = self.attention(data, data, data, need_weights=False)
        self.attention.eval()
        with torch.no_grad():
            out = out + self.attention(data, data, data)[0]
        self.attention.train()
        heads = out.view(2, 5, 4, 4).transpose(1, 2)
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=0.1)
        shared = F.scaled_dot_product_attention(heads, heads[:, :2], heads[:, :2], enable_gqa=True)
        return mixed.sum() + shared.square().sum() + self.bag(places).sum()


def attention() -> Program:
    model = Attends()
    return trained(model, lambda: model(torch.randint(20, (2, 5))))


def cnn() -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.Conv2d(4, 4, 3, groups=2),
        nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return trained(model, lambda: F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([0, 2])))


def opt_fused() -> Program:
    model = layers.small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return trained(model, lambda: model(torch.randn(3, 6)).square().sum(), optimizer)


def opt_loop() -> Program:
    model = layers.small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=False)
    return trained(model, lambda: model(torch.randn(3, 6)).square().sum(), optimizer)


def hf_generate_llama() -> Program:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(transformers.llama_config()).eval()

    def step() -> list[int]:
        prompt = torch.tensor([[1, 5, 7]])
        out = model.generate(prompt, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt))
        return out[0].tolist()

    return Program(step, model)


def holds_hf_generate_llama(dump: ulpscope.Dump, level: str) -> None:
    if level in ("module", "mix"):
        assert sum(call.name == "LlamaForCausalLM" for call in dump.ids()) == 4


def hf_generate_t5() -> Program:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    prompt = torch.tensor([[3, 5, 7]])
    return Program(lambda: model.generate(prompt, num_beams=2, max_new_tokens=3, do_sample=False).tolist(), model)


def hf_train_llama_ckpt() -> Program:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(transformers.llama_config())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(32, (2, 6))
    return trained(model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss)


def hf_train_bert() -> Program:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        attn_implementation="eager",
    )  # fmt: skip
    model = BertForMaskedLM(config)
    tokens = torch.randint(64, (2, 6))

    def loss() -> Any:
        out = model(input_ids=tokens, labels=tokens, output_hidden_states=True, output_attentions=True)
        assert len(out.hidden_states) == 3 and len(out.attentions) == 2
        return out.loss

    return trained(model, loss)


def inference() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)).eval()

    def step() -> list[Any]:
        data = torch.randn(3, 4)
        with torch.inference_mode():
            fast = model(data)
            shown = [fast.is_inference(), fast.tolist()]
        with torch.no_grad():
            return [*shown, model(data)]

    return Program(step, model)


def cuda_free() -> Program:
    def step() -> list[Any]:
        def word(work: Any) -> Any:
            try:
                return work()
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        with torch.autocast("cuda", enabled=False):
            out = torch.ones(2) * 2
        return [
            torch.cuda.is_available(), torch.cuda.device_count(), word(torch.cuda.synchronize),
            word(lambda: torch.ones(1, device="cuda")), torch.cuda.is_initialized(), out,
        ]  # fmt: skip

    return Program(step)


def index_2d_not_started() -> Program:
    weight = nn.Parameter(torch.randn(6, 3))

    def step() -> list[Any]:
        weight.grad = None
        out = weight[torch.tensor([[0, 1], [5, 2]])]
        out.square().sum().backward()
        return [out, weight.grad]

    return Program(step)
