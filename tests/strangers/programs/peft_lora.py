# needs: peft
# steps: 3
"""Low-rank adapters on a small random Llama; only they are trained; then they are merged."""

import torch
from ending import told
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = get_peft_model(
    LlamaForCausalLM(config),
    LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"),
)
optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
losses = []
for _ in range(3):
    tokens = torch.randint(0, 64, (2, 12))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
merged = model.merge_and_unload().eval()
with torch.no_grad():
    told(losses, merged(input_ids=tokens).logits)
