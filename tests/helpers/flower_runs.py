"""Runs that Flower and the sequential engine end alike."""

import torch

from fedbayes import Simulation
from fedbayes.federation.client_runtime import ClientFailure
from fedbayes.federation.engines.sequential import Sequential

DATA = {"name": "digits", "clients": 3, "partition": "iid"}


METHODS = {
    "fedavg": {"name": "fedavg"},
    "fedsparse": {"name": "fedsparse"},
    "gpi-fnm": {"name": "gpi-fnm"},
    "virtual, one after another": {"name": "virtual"},
    "virtual, all at once": {"name": "virtual"},
    "scaffold": {"name": "scaffold"},
}


class Losing(Sequential):
    """The sequential engine, but without the reports that a federation lost or refused."""

    def __init__(self, runtime, losses):
        super().__init__(runtime)
        self._losses = {(loss["round"], loss["client"]) for loss in losses}

    def train(self, tasks):
        for task in tasks:
            if (task.round, task.client) in self._losses:
                yield ClientFailure("lost on purpose")
            else:
                yield from super().train([task])


def without(config, losses=()):
    """The global model of the sequential engine without these reports."""
    config = config.model_copy(update={"engine": "sequential"})
    with Simulation(config, engine=lambda run: Losing(run.runtime, losses)) as simulation:
        for _ in simulation:
            pass
        return simulation.method.model(simulation.server, simulation.run)


def settings(label, **more):
    cohort = 1 if label == "virtual, one after another" else 1.0
    return {
        "seed": 7,
        "rounds": 2,
        "cohort": cohort,
        "data": DATA,
        "metrics": [],
        "method": METHODS[label],
        **more,
    }


def same(one, other):  # bit for bit
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)
