"""Stages of users: both ends of a round, by their place in the config."""

import pytest
import torch

from fedbayes import Config, Simulation
from fedbayes.contracts import Report
from fedbayes.errors import ConfigError
from fedbayes.federation.stages.stage import Stage

SMALL = {
    "data": {"name": "digits", "clients": 4, "partition": "iid", "limit": 200},
    "model": {"hidden": [4]},
    "rounds": 1,
    "training": {"epochs": 1, "optimizer": "sgd", "lr": 0.1},
}


class Halved(Stage):
    """Clients go half of the way."""

    def client(self, report, message, at):
        half = {n: message[n] + (t - message[n]) / 2 for n, t in report.tensors.items()}
        return Report(half, report.weight)


class Picky(Stage):
    """The server takes no report of client 1."""

    def server(self, arrivals, ledger):
        for arrival in arrivals:
            if arrival.client == 1:
                ledger.refuse(1, "it is client 1")
            else:
                yield arrival


class Nothing(Stage):
    def serve(self, arrivals, ledger):
        return arrivals


class Needs(Stage):
    def __init__(self, share):
        self.share = share


class Forgets(Stage):
    def client(self, report, message, at):
        return None


class Fails(Stage):
    def client(self, report, message, at):
        return report.tensors["nowhere"]


class Lost(Stage):
    def server(self, arrivals, ledger):
        return None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nothing", r"Nothing' does nothing\. Define client, server or both"),
        ("Needs", "cannot be made without arguments"),
        ("Forgets", "Forgets returns a NoneType from client"),
        ("Fails", "Fails failed at client 0: KeyError"),
        ("Lost", "Lost returns a NoneType from server"),
    ],
)
def test_a_mistake_in_a_stage_names_it(name, words):
    with pytest.raises(ConfigError, match=words):
        after_a_round(stages=[f"{__name__}:{name}"])


def after_a_round(**settings):
    """The weights at the start and after a round, and its metrics."""
    with Simulation(Config.create(**{**SMALL, **settings})) as simulation:
        start = {n: t.clone() for n, t in simulation.server.weights.items()}
        (step,) = list(simulation)
    return start, step.server.weights, step.metrics


def test_a_client_s_end_changes_what_is_sent():
    start, plain, _ = after_a_round()
    _, half, _ = after_a_round(stages=[f"{__name__}:Halved"])
    for name, weights in half.items():
        torch.testing.assert_close(weights - start[name], (plain[name] - start[name]) / 2)


def test_a_server_s_end_rejects_a_report_by_name():
    _, _, metrics = after_a_round(stages=[f"{__name__}:Picky"])
    assert metrics["refused"] == {"1": "it is client 1"}


@pytest.mark.slow
def test_worker_processes_have_the_stages_too():
    _, here, _ = after_a_round(stages=[f"{__name__}:Halved"])
    _, there, _ = after_a_round(stages=[f"{__name__}:Halved"], engine="workers", workers=1)
    for name, weights in here.items():
        torch.testing.assert_close(there[name], weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stages": ["nowhere"]}, "unknown stage 'nowhere'. Choose"),
        (
            {"stages": ["tests.federation.stages.test_stages:after_a_round"]},
            "not a class derived from",
        ),
        (
            {"stages": [f"{__name__}:Halved"], "method": {"name": "scaffold"}},
            "scaffold needs clients.* but the stage Halved changes",
        ),
        (
            {
                "stages": [f"{__name__}:Picky"],
                "privacy": {"noise": 1.0},
                "aggregation": {"clip": 1.0},
            },
            "privacy.noise excludes them",
        ),
    ],
)
def test_what_does_not_go_together_is_an_error(settings, words):
    with pytest.raises(ConfigError, match=words):
        Simulation(Config.create(**{**SMALL, **settings}))
