"""Linear regressions of several clients, with posteriors in closed form."""

import torch
from lifelines.datasets import load_rossi
from torch import nn

from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import Network
from tests.helpers.places import run_of

STD = 0.7
"""Of the noise, known."""


def regressions(clients=3, rows=20, orthogonal=True, seed=1, apart=1.0):
    """Rows of each client, float64: columns are orthogonal within clients, of other lengths."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for number in range(clients):
        x = torch.randn(rows, 2, generator=rng, dtype=torch.float64)
        if orthogonal:
            x = torch.linalg.qr(x)[0] * torch.tensor([2.0, 3.0 + number])
        truth = torch.tensor([[1.5], [-0.5 + apart * number]], dtype=torch.float64)
        y = x @ truth + STD * torch.randn(rows, 1, generator=rng, dtype=torch.float64)
        found.append(Samples(x, y))
    return found


def linear_run(cohort=3, clients=3, **training):
    net = Network(nn.Sequential(nn.Linear(2, 1, bias=False).double()), shape=(2,))
    target = Target("real", ("y",), center=(0.0,), scale=(1.0,))
    likelihood = build_likelihood("gaussian", target, noise=STD)
    settings = {"lr": 0.3, "epochs": 120, "batch_size": 20, **training}
    return run_of(net, clients=clients, cohort=cohort, rounds=30, likelihood=likelihood, **settings)


def pooled(data, prior=1.0):
    """Λ = 1 + Σ x xᵀ/σ², Λ μ = Σ x y/σ², float64."""
    x, y = torch.cat([one.x for one in data]), torch.cat([one.y for one in data])
    precision = prior * torch.eye(2, dtype=torch.float64) + x.T @ x / STD**2
    return torch.linalg.solve(precision, x.T @ y / STD**2)[:, 0], precision


def rossi(tmp_path, sites=3):
    """Rearrests of 432 people, many at the same week, and a site of each."""
    frame = load_rossi()
    frame["site"] = [f"site {row % sites}" for row in range(len(frame))]
    frame.to_csv(tmp_path / "rossi.csv", index=False)
    return frame


def settings_of(tmp_path, **more):
    data = {"path": tmp_path / "rossi.csv", "label": ["week", "arrest"], "group": "site"}
    return {"data": data, "task": {"likelihood": "cox"}, "rounds": 2} | more
