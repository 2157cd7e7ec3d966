"""A network of which some layers are each client's own."""

from torch import nn

OWN = {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}


def network(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, outputs))


def settings(**more):
    return {
        "rounds": 2,
        "data": {"name": "digits", "clients": 2, "partition": "iid", "limit": 120},
        "model": {"name": "tests.helpers.own_layers:network", "batch_norm": "local"},
        "training": {"batch_size": 1000, "lr": 0.1, "epochs": 1},
        "calibration": "none",
        **more,
    }
