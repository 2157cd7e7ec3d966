"""Runs that Flower and the sequential engine end alike."""

import torch
from flwr.common.constant import PARTITION_ID_KEY

from fedbayes import Config, Simulation
from fedbayes.federation.client_runtime import ClientFailure
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.flower.apps import client_app, flower
from fedbayes.flower.node import Node
from fedbayes.flower.own_data import own_data
from fedbayes.flower.simulated import simulated_grid
from fedbayes.runs.build import build_data, build_runtime
from fedbayes.storage.state_store import StateStore

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


def federated(folder, wards, *, spoilt=(), **more):
    """A run of nodes with tables of their own, in one process."""
    data = {"path": str(wards / "server.csv"), "label": ["ill"], "clients": 3, "partition": "iid"}
    asked = {"data": data, "rounds": 2, "engine": "flower-simulation", "evaluate_at": "clients"}
    config = Config.published(**(asked | more))
    wanted = build_data(config).preprocessing

    def node(context):
        client = int(context.node_config[PARTITION_ID_KEY])
        own = own_data(config, wards / f"{client}.csv", wanted)
        return Node(client, lambda: build_runtime(config, own), StateStore(folder / str(client), 1))

    grid, close = simulated_grid(client_app(node), 3)

    def engine(run):
        make = flower(config, run.cohort)
        options = {"clients": 3, "timeout": 60.0, "poll": 0.01, "closing": close}
        return make(lambda: grid, run.runtime, **options)

    with Simulation(config, folder / "run", engine=engine) as simulation:
        for _ in simulation:
            pass
        return simulation.summary(), simulation.folder.metrics()
