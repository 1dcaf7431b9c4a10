# needs: performer-pytorch
# steps: 2
"""Attention by random features, drawn anew with QR factors."""

import torch
from ending import told
from performer_pytorch import PerformerLM

torch.manual_seed(0)
model = PerformerLM(
    num_tokens=50, max_seq_len=32, dim=32, depth=2, heads=2, dim_head=16, causal=False, feature_redraw_interval=1
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(2):
    tokens = torch.randint(0, 50, (2, 32))
    loss = torch.nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told(losses, model)
