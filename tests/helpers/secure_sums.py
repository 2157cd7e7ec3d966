"""Runs with secure sums, and their sums."""

import torch

from fedbayes import Config
from fedbayes.federation.stages.secure import Secure
from fedbayes.federation.stages.secure import plan as make_plan

CLIENTS = 4


def settings(method="fedavg", secure=(), **more):
    return Config.published(
        **{
            "seed": 7,
            "rounds": 1,
            "engine": "flower-simulation",
            "round_timeout": 60,
            "metrics": [],
            "data": {"name": "digits", "clients": CLIENTS, "partition": "dirichlet"},
            "method": {"name": method} if isinstance(method, str) else method,
            "secure": {"enabled": True, **dict(secure)},
            **more,
        }
    )


def open_sum(config):
    """The same run without secure aggregation."""
    return config.model_copy(update={"secure": Secure()})


def plan_of(config):
    return make_plan(config.secure, config.build_method(), config.aggregation, CLIENTS)


def close(one, other, within=1e-5):
    return all(torch.allclose(one[name], other[name], rtol=0, atol=within) for name in one)
