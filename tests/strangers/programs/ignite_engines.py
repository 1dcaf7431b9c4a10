# needs: pytorch-ignite
# steps: 4
"""ignite's engines: an evaluation after each epoch of two batches."""

import torch
from ending import told
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
batches = DataLoader(TensorDataset(torch.randn(16, 1, 8, 8), torch.randint(0, 4, (16,))), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
trainer = create_supervised_trainer(model, torch.optim.RMSprop(model.parameters(), lr=1e-3), nn.CrossEntropyLoss())
evaluator = create_supervised_evaluator(model, metrics={"loss": Loss(nn.CrossEntropyLoss())})
losses = []


@trainer.on(Events.EPOCH_COMPLETED)
def validate(engine):
    losses.append(evaluator.run(batches).metrics["loss"])


trainer.run(batches, max_epochs=2)
told(losses, model)
