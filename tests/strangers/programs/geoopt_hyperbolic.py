# needs: geoopt
# steps: 5
"""An optimizer on a manifold: its steps are many small calls on parameters of a class of its own. No module runs: what follows the
last of four updates is a step too."""

import geoopt
import torch
from ending import told

torch.manual_seed(0)
ball = geoopt.PoincareBall()
points = geoopt.ManifoldParameter(ball.random_normal(10, 2, std=0.3), manifold=ball)
optimizer = geoopt.optim.RiemannianAdam([points], lr=1e-2)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = (ball.dist(points[:5], points[5:]) - 1.0).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told(losses, points)
