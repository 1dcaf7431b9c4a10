# needs: kornia
# steps: 2
"""Pictures are turned, blurred and coloured by kornia before a small network sees them."""

import kornia.augmentation as K
import torch
from ending import told
from torch import nn

torch.manual_seed(0)
change = nn.Sequential(
    K.RandomAffine(20.0, p=1.0),
    K.ColorJitter(0.1, 0.1, 0.1, 0.1, p=1.0),
    K.RandomGaussianBlur((3, 3), (0.5, 1.0), p=1.0),
)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(2):
    data, kind = torch.rand(4, 3, 16, 16), torch.randint(0, 3, (4,))
    loss = nn.functional.cross_entropy(model(change(data)), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told(losses, model)
