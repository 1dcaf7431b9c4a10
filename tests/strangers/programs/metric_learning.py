# needs: pytorch-metric-learning
# steps: 3
"""Triplets are mined among the embeddings: shapes depend on values."""

import torch
from ending import told
from pytorch_metric_learning import losses, miners
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
mine, goal = miners.MultiSimilarityMiner(), losses.TripletMarginLoss(margin=0.2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
found = []
for _ in range(3):
    data, kind = torch.randn(24, 6), torch.randint(0, 4, (24,))
    out = model(data)
    loss = goal(out, kind, mine(out, kind))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found.append(loss.item())
told(found, model)
