# needs: pyro-ppl
# steps: 4
"""Variational inference: parameters that are no module's, sampled losses, an optimizer for each parameter."""

import pyro
import pyro.distributions as dist
import torch
from ending import told
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

pyro.set_rng_seed(0)
data = torch.randn(40, 3)
target = data @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(40)


def model(data, target):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(data)):
        pyro.sample("seen", dist.Normal(data @ weight, noise), obs=target)


guide = AutoNormal(model)
inference = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.05}), Trace_ELBO(num_particles=2))
losses = [inference.step(data, target) for _ in range(4)]
told([float(loss) for loss in losses], [value for _, value in sorted(pyro.get_param_store().items())])
