# needs: e3nn
# steps: 3
"""Spherical harmonics and tensor products, which e3nn generates as TorchScript."""

import torch
from e3nn import o3
from e3nn.nn import FullyConnectedNet
from ending import told

torch.manual_seed(0)
irreps_in, irreps_edge, irreps_out = (
    o3.Irreps("4x0e + 2x1o"),
    o3.Irreps.spherical_harmonics(2),
    o3.Irreps("4x0e + 2x1o"),
)
product = o3.FullyConnectedTensorProduct(irreps_in, irreps_edge, irreps_out, shared_weights=False)
radial = FullyConnectedNet([4, 8, product.weight_numel], torch.nn.functional.silu)
optimizer = torch.optim.Adam(radial.parameters(), lr=1e-2)
losses = []
for _ in range(3):
    place = torch.randn(12, 3)
    edges = o3.spherical_harmonics(irreps_edge, place, True, normalization="component")
    out = product(irreps_in.randn(12, -1), edges, radial(place.norm(dim=1, keepdim=True).repeat(1, 4)))
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told(losses, radial)
