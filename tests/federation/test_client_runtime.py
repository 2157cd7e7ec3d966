"""When clients' training has the global generators seeded."""

import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes import Config, Simulation
from fedbayes.core import seeds
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.federation.stages.stage import Stage
from fedbayes.methods import METHODS
from fedbayes.methods.fedavg import FedAvg
from fedbayes.models import Network
from tests.helpers.cases import cases


def global_states():
    """Of the global generators of PyTorch, NumPy and Python."""
    numpy = np.random.get_state()  # noqa: NPY002
    return (
        torch.get_rng_state().tolist(),
        *(np.asarray(e).tolist() for e in numpy),
        random.getstate(),
    )


@pytest.mark.parametrize("method", cases(METHODS, slow=["fedfuse"]))
@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_what_is_built_in_draws_from_no_global_generator(method):
    """So that they are seeded only where code of users or layers may draw from them."""
    settings = {"rounds": 2, "evaluate_local_every": 0, "data": {"clients": 2, "limit": 100}}
    config = Config.create(method=method, engine="sequential", model={"hidden": [4]}, **settings)
    with Simulation(config) as simulation:
        assert not simulation.runtime.draws
        train, found = ClientRuntime.train, []

        def watched(runtime, task):
            before = global_states()
            outcome = train(runtime, task)
            found.append(global_states() == before)
            return outcome

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClientRuntime, "train", watched)
            patch.setattr(seeds, "kept", nullcontext)  # who seeds them puts them back at once
            next(iter(simulation))
    assert found
    assert all(found)


class Shaken(nn.Module):
    """A layer of a user that draws from a global generator."""

    def forward(self, x):
        return x + torch.randn(1)


class OwnAverage(FedAvg):
    """A method of a user."""


def test_layers_and_code_that_may_draw_from_global_generators_have_them_seeded():
    dropout = Config.create(model={"hidden": [4], "dropout": 0.2}, data={"limit": 100})
    with Simulation(dropout) as simulation:
        assert simulation.runtime.draws
        runtime = simulation.runtime
    with Simulation(Config.create(model={"hidden": [4]}, data={"limit": 100})) as simulation:
        runtime = simulation.runtime
    assert not runtime.draws
    assert replace(runtime, method=OwnAverage()).draws
    assert replace(runtime, stages=(Stage(),)).draws
    schedule = runtime.run.training.model_copy(update={"schedule": "tests.somewhere:schedule"})
    assert replace(runtime, run=replace(runtime.run, training=schedule)).draws
    hooked = nn.Linear(4, 3)
    hooked.register_forward_hook(lambda *_: None)
    for module in (nn.Sequential(nn.Linear(4, 3), Shaken()), hooked):
        network = Network(module, shape=(4,))
        assert network.draws
        assert replace(runtime, run=replace(runtime.run, network=network)).draws
