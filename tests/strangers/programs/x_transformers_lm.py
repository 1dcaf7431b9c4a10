# needs: x-transformers
# steps: 3
"""A language model of x-transformers, then text generated from it."""

import torch
from ending import told
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=24, attn_layers=layers))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for _ in range(3):
    loss = model(torch.randint(0, 64, (4, 25)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.eval()
tokens = model.generate(torch.zeros(1, 1, dtype=torch.long), 8, temperature=0.0)
told(losses, model, tokens)
