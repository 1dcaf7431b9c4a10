# needs: vector-quantize-pytorch
# steps: 3
"""An autoencoder whose codebook is a moving average: buffers that a forward pass writes."""

import torch
from ending import told
from torch import nn
from vector_quantize_pytorch import VectorQuantize

torch.manual_seed(0)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.codes = VectorQuantize(dim=16, codebook_size=32, decay=0.8, commitment_weight=0.25)
        self.back = nn.Linear(16, 8)

    def forward(self, data):
        codes, indices, commitment = self.codes(self.into(data))
        return self.back(codes), indices, commitment


model = Coder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    data = torch.randn(4, 10, 8)
    out, indices, commitment = model(data)
    loss = (out - data).abs().mean() + commitment.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told(losses, model, indices)
