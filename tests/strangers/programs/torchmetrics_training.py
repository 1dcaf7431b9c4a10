# needs: torchmetrics
# steps: 3
"""Metrics that are modules with states of their own, beside a model."""

import torch
import torchmetrics
from ending import told
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
metrics = torchmetrics.MetricCollection(
    [
        torchmetrics.Accuracy(task="multiclass", num_classes=3),
        torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
    ]
)
losses = []
for _ in range(3):
    data, kind = torch.randn(16, 6), torch.randint(0, 3, (16,))
    logits = model(data)
    loss = nn.functional.cross_entropy(logits, kind, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    metrics(logits.softmax(-1), kind)
    losses.append(loss.item())
told(losses, model, [value.item() for value in metrics.compute().values()])
