# needs: torchsde
# steps: 2
"""A stochastic differential equation, solved forward and by its adjoint backward."""

import torch
import torchsde
from ending import told
from torch import nn

torch.manual_seed(0)


class Motion(nn.Module):
    noise_type, sde_type = "diagonal", "stratonovich"

    def __init__(self):
        super().__init__()
        self.drift, self.spread = nn.Linear(3, 3), nn.Linear(3, 3)

    def f(self, t, y):
        return torch.tanh(self.drift(y))

    def g(self, t, y):
        return 0.2 * torch.sigmoid(self.spread(y))


motion = Motion()
optimizer = torch.optim.Adam(motion.parameters(), lr=1e-2)
times = torch.linspace(0, 0.5, 5)
losses = []
for number in range(2):
    path = torchsde.BrownianInterval(t0=0.0, t1=0.5, size=(6, 3), entropy=number)
    out = torchsde.sdeint_adjoint(motion, torch.full((6, 3), 0.1), times, bm=path, dt=0.1, method="midpoint")
    loss = (out[-1] - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told(losses, motion)
