# needs: monai
# steps: 2
"""A three-dimensional U-Net with a Dice loss, and inference in sliding windows."""

import torch
from ending import told
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

torch.manual_seed(0)
model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
goal = DiceCELoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(2):
    data, mask = torch.randn(1, 1, 16, 16, 16), torch.randint(0, 2, (1, 1, 16, 16, 16))
    loss = goal(model(data), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    out = sliding_window_inference(torch.randn(1, 1, 24, 16, 16), (16, 16, 16), 1, model)
told(losses, model, out)
