# needs: skorch
# steps: 8
"""scikit-learn's interface: two epochs of four batches, each followed by a validation."""

import numpy
import torch
from ending import told
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
numpy.random.seed(0)
data = numpy.random.randn(160, 10).astype(numpy.float32)
kind = (data[:, 0] > 0).astype(numpy.int64)
net = NeuralNetClassifier(
    nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)),
    criterion=nn.CrossEntropyLoss,
    max_epochs=2,
    lr=0.1,
    batch_size=32,
    verbose=0,
)
net.fit(data, kind)
told(net.history[-1, "train_loss"], net.history[-1, "valid_loss"], net.module_)
