# needs: gpytorch
# steps: 5
"""A Gaussian process: Cholesky factors, solves, and a prediction at the end, which is a fifth step: its models are called by a way
of their own, not as modules."""

import gpytorch
import torch
from ending import told

torch.manual_seed(0)
at = torch.linspace(0, 1, 30)
seen = torch.sin(at * 6.28) + torch.randn(30) * 0.1


class Process(gpytorch.models.ExactGP):
    def __init__(self, at, seen, likelihood):
        super().__init__(at, seen, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, at):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))


likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Process(at, seen, likelihood)
model.train(), likelihood.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
goal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = -goal(model(at), seen)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.eval(), likelihood.eval()
with torch.no_grad():
    mean = likelihood(model(torch.linspace(0, 1, 11))).mean
told(losses, model, mean)
