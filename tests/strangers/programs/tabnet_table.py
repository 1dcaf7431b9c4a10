# needs: pytorch-tabnet
# steps: 5
"""A table: two epochs of two batches, ghost batch norms, sparsemax; what explains them afterwards calls parts of the model, a fifth step."""

import numpy
from ending import told
from pytorch_tabnet.tab_model import TabNetClassifier

numpy.random.seed(0)
data = numpy.random.randn(64, 6).astype(numpy.float32)
kind = (data[:, 1] > 0).astype(int)
model = TabNetClassifier(n_d=4, n_a=4, n_steps=2, seed=0, verbose=0, device_name="cpu")
model.fit(
    data, kind, eval_set=[(data[:16], kind[:16])], max_epochs=2, batch_size=32, virtual_batch_size=16, drop_last=True
)
told(model.network)
