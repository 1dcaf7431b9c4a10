# needs: snntorch
# steps: 3
"""Spiking neurons: a step function forward, another function's derivative backward, over ten moments."""

import snntorch
import torch
from ending import told
from torch import nn

torch.manual_seed(0)
first, last = nn.Linear(8, 16), nn.Linear(16, 3)
one, two = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)
model = nn.ModuleList([first, one, last, two])
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
losses = []
for _ in range(3):
    data, kind = torch.rand(5, 8), torch.randint(0, 3, (5,))
    inner, outer = one.init_leaky(), two.init_leaky()
    spikes = []
    for _ in range(10):
        spike, inner = one(first(data), inner)
        spike, outer = two(last(spike), outer)
        spikes.append(spike)
    loss = nn.functional.cross_entropy(torch.stack(spikes).sum(0), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told(losses, model)
