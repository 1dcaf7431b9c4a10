"""Tiny models of the transformers library with random weights. Nothing is downloaded. Each function builds one, afresh."""

from typing import Any

import torch
import transformers
from torch import Tensor

from integration.programs_layers import trained
from integration.runs import Program

_SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, 32, shape)


def llama_config(**options: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**_SMALL, num_key_value_heads=1, max_position_embeddings=32, **options)


def _language_model(model: torch.nn.Module) -> Program:
    def loss() -> Tensor:
        tokens = _tokens(2, 7)
        return model(input_ids=tokens, labels=tokens).loss

    return trained(model, loss, torch.optim.AdamW(model.parameters(), lr=0.01))


def llama() -> Program:
    return _language_model(transformers.LlamaForCausalLM(llama_config()))


def llama_eager_bf16_with_checkpointing() -> Program:
    model = transformers.LlamaForCausalLM(llama_config(attn_implementation="eager")).bfloat16()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    return _language_model(model.train())


def llama_generating() -> Program:
    model = transformers.LlamaForCausalLM(llama_config(pad_token_id=0, eos_token_id=1, bos_token_id=2)).eval()

    def step() -> dict[str, Any]:
        prompt = _tokens(2, 4)
        mask = torch.ones_like(prompt)
        greedy = model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)
        sampled = model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=True, top_k=5)
        return {"greedy": greedy, "sampled": sampled}

    return Program(step, model)


def gpt2() -> Program:
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return _language_model(transformers.GPT2LMHeadModel(config))


def bert() -> Program:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**_SMALL, num_labels=3))

    def loss() -> Tensor:
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
        return model(input_ids=_tokens(2, 5), attention_mask=mask, labels=torch.randint(3, (2,))).loss

    return trained(model, loss, torch.optim.AdamW(model.parameters(), lr=0.01))


def vit() -> Program:
    options = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**options, image_size=8, patch_size=4, num_labels=3)
    )

    def loss() -> Tensor:
        return model(pixel_values=torch.randn(2, 3, 8, 8), labels=torch.randint(3, (2,))).loss

    return trained(model, loss)


def t5() -> Program:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return trained(model, lambda: model(input_ids=_tokens(2, 5), labels=_tokens(2, 4)).loss)


def mixture_of_experts() -> Program:
    config = transformers.MixtralConfig(
        **_SMALL, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True
    )
    return _language_model(transformers.MixtralForCausalLM(config))
