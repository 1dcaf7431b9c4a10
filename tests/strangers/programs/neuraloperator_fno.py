# needs: neuraloperator
# steps: 3
"""A Fourier neural operator: complex weights between two FFTs."""

import torch
from ending import told
from neuralop.models import FNO

torch.manual_seed(0)
model = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    data = torch.randn(2, 1, 16, 16)
    loss = (model(data) - data.roll(1, -1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told(losses, [torch.view_as_real(value) if value.is_complex() else value for value in model.parameters()])
