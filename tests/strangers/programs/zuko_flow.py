# needs: zuko
# steps: 3
"""A normalizing flow of splines: searches in sorted bins, determinants, samples."""

import torch
import zuko
from ending import told

torch.manual_seed(0)
flow = zuko.flows.NSF(2, context=1, transforms=2, hidden_features=(16, 16))
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    data, given = torch.randn(32, 2), torch.randn(32, 1)
    loss = -flow(given).log_prob(data).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with torch.no_grad():
    told(losses, flow, flow(torch.zeros(1)).sample((4,)))
