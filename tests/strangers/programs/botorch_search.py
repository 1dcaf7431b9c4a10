# needs: botorch
# steps: *
"""Bayesian optimization: both fits are scipy's L-BFGS over closures, no optimizer of torch."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from ending import told
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(0)
at = torch.rand(8, 2, dtype=torch.float64)
seen = -(at - 0.4).square().sum(-1, keepdim=True)
model = SingleTaskGP(at, seen)
fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 5}})
bounds = torch.stack([torch.zeros(2), torch.ones(2)]).double()
place, value = optimize_acqf(
    LogExpectedImprovement(model, seen.max()), bounds, q=1, num_restarts=2, raw_samples=8, options={"maxiter": 5}
)
told(place, value)
