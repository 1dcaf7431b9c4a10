# needs: lion-pytorch torch-ema
# steps: 3
"""An optimizer and a moving average of the weights from two small packages."""

import torch
from ending import told
from lion_pytorch import Lion
from torch import nn
from torch_ema import ExponentialMovingAverage

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 16), nn.Hardswish(), nn.Linear(16, 1))
optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=1e-2)
average = ExponentialMovingAverage(model.parameters(), decay=0.9)
losses = []
for _ in range(3):
    loss = model(torch.randn(8, 5)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update()
    losses.append(loss.item())
with average.average_parameters():
    told(losses, model)
