"""The contract carries what later methods need: see `toy_methods`."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import fedbayes
from fedbayes import Simulation
from fedbayes.contracts import Part, Reports
from fedbayes.core.messages import decode, dense
from fedbayes.core.tensors import unpack
from fedbayes.errors import ConfigError, MessageError
from fedbayes.methods.fedavg import FedAvg
from fedbayes.methods.feddrop import FedDrop
from fedbayes.methods.fedprox import FedProx
from fedbayes.methods.fedsparse import FedSparse
from fedbayes.methods.mixture import Mixture
from fedbayes.methods.pvi import Pvi
from fedbayes.methods.scaffold import Scaffold
from fedbayes.methods.virtual import Virtual
from fedbayes.testing import MethodContract, _captured
from tests.helpers.places import network, run_of
from tests.helpers.toy_methods import Control, Visits


class TestMedian(MethodContract):
    method = "tests.helpers.toy_methods:Median"


@pytest.mark.slow
class TestGrowing(MethodContract):
    method = "tests.helpers.toy_methods:Growing"

    def test_the_model_grows_and_each_client_gets_its_own(self, tmp_path):
        run = fedbayes.run(self.config(rounds=3), tmp_path)
        assert [line["update"]["width"] for line in run.metrics] == [9, 10, 11]
        assert run.model["1.weight"].shape == (11, 64)
        assert run.summary["model_parameters"] == 11 * 64 + 11 + 11 * 10 + 10

    def test_private_state_counts_visits(self, tmp_path):
        with Simulation(self.config(rounds=4, cohort=4), tmp_path) as simulation:
            visits = [step.metrics["reported"]["visits"] for step in simulation]
            states = {c: unpack(Visits, dense(decode(s))) for c, s in simulation.states.items()}
        assert visits == [1, 2, 3, 4]
        assert len(states) == 4
        owns = {tuple((state.own - state.count).tolist()) for state in states.values()}
        assert len(owns) == 4, "each client joins with a generator of its own"


@pytest.mark.slow
class TestControlled(MethodContract):
    method = "tests.helpers.toy_methods:Controlled"

    def test_control_variates_sum_to_the_servers(self, tmp_path):
        with Simulation(self.config(rounds=5), tmp_path) as simulation:
            list(simulation)
            states = [unpack(Control, dense(decode(s))) for s in simulation.states.values()]
            for name, total in simulation.server.control.items():
                summed = torch.stack([state.control[name] for state in states]).sum(dim=0)
                torch.testing.assert_close(total, summed, rtol=1e-4, atol=1e-6)


class TestHalfSilent(MethodContract):
    method = "tests.helpers.toy_methods:HalfSilent"

    def test_half_the_bytes_and_half_the_model(self, tmp_path):
        half = fedbayes.run(self.config(model={"hidden": [200]}), tmp_path / "half")
        settings = {"model": {"hidden": [200]}, "method": {"name": "fedavg"}}
        full = fedbayes.run(self.config(**settings), tmp_path / "full")
        assert half.summary["bytes_down"] < 0.52 * full.summary["bytes_down"]
        assert half.summary["bytes_up"] < 0.52 * full.summary["bytes_up"]
        assert half.summary["sparsity"] > 0.49


def broken(method):
    """The contract of a toy method that breaks it."""
    contract = MethodContract()
    contract.method = f"tests.helpers.toy_methods:{method}"
    return contract


WEIGHTS = Part()
NORMS = Part(origin="zero", exact=True)
TRACKED = Scaffold.reports.parts["control"]
DECLARED = {
    "nothing": (Scaffold, Reports({"weights": WEIGHTS}), "does not declare"),
    "not tracked": (
        Scaffold,
        Reports({"weights": WEIGHTS, "control": Part(origin="zero")}),
        "declare Part.* for 'control'",
    ),
    "from the server": (
        Scaffold,
        Reports({"weights": WEIGHTS, "control": replace(TRACKED, origin="server")}),
        "declare Part.* for 'control'",
    ),
    "never retracted": (
        Scaffold,
        Reports({"weights": WEIGHTS, "control": replace(TRACKED, retract=lambda c, missed: c)}),
        ".* is not restored",
    ),
    "whole": (FedDrop, Reports(), "must be complete"),
    "never there": (
        FedAvg,
        Reports({"weights": WEIGHTS, "control": TRACKED}),
        "no report has the part 'control'",
    ),
    "never sparse": (
        FedAvg,
        Reports({"weights": Part(mask="chosen")}),
        "no report leaves out entries of 'weights'",
    ),
    "compressible": (
        Pvi,
        Reports(
            dict.fromkeys(
                ("precision", "shift"),
                Part(
                    origin="zero",
                    tracked=True,
                    retract=lambda client, missed: type(client)(client.factor),
                ),
            )
        ),
        "not restored|precision",
    ),
}


@pytest.mark.parametrize("wrong", DECLARED)
def test_a_wrong_declaration_is_found(wrong, tmp_path, monkeypatch):
    kind, declaration, words = DECLARED[wrong]
    contract = MethodContract()
    contract.method = kind.name
    simulation = contract.after_one_round(tmp_path)
    monkeypatch.setattr(contract, "after_one_round", lambda folder: simulation)
    monkeypatch.setattr(kind, "reports", declaration)
    with pytest.raises((AssertionError, MessageError, ConfigError), match=words):
        contract.test_reports_are_what_is_declared(tmp_path)


def test_an_optional_part_may_be_missing(tmp_path, monkeypatch):
    contract = MethodContract()
    contract.method = "fedavg"
    parts = {"weights": Part(mask="sent", optional=True), "more": Part(optional=True)}
    monkeypatch.setattr(FedAvg, "reports", Reports(parts))
    contract.test_reports_are_what_is_declared(tmp_path)


def test_flags_of_older_methods_name_what_declares_the_same():
    with pytest.raises(ConfigError, match=r"Old sets acknowledged.*Declare Part\(tracked"):

        class Old(FedAvg):
            def acknowledged(self, client, missed):
                return client


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("Capturing", "the loss captures"),
        ("Remembering", "depends on what came before"),
        ("Meddling", "the loss changed /0/"),
    ],
)
def test_a_loss_that_is_not_pure_is_found(method, words, tmp_path):
    with pytest.raises(AssertionError, match=words):
        broken(method).test_the_loss_is_pure(tmp_path)


def test_a_loss_that_cannot_be_mapped_is_found(tmp_path):
    with pytest.raises(RuntimeError, match=r"vmap"):
        broken("Branching").test_losses_of_clients_can_be_mapped(tmp_path / "one")


def test_a_method_that_solves_by_itself_is_excused_from_mapping(tmp_path):
    broken("Alone").test_losses_of_clients_can_be_mapped(tmp_path)


def test_info_that_is_read_is_found(tmp_path):
    with pytest.raises(AssertionError, match="depends on Info"):
        broken("Curious").test_info_is_only_told(tmp_path)


@pytest.mark.parametrize(
    "hide",
    [
        lambda t: lambda *_: t.sum(),
        lambda t: partial(lambda t, *_: t.sum(), t),
        lambda t: partial(lambda *_, given: given, given={"a": [t]}),
        lambda t: lambda *_, kept=(t,): kept,
        lambda t: Holder(t).loss,
        lambda t: Holder({"a": {"b": t}}),
        lambda t: (lambda inner: lambda *_: inner())(lambda: t),
        lambda t: nn.Linear(1, 1),
    ],
)
def test_tensors_are_found_wherever_a_loss_hides_them(hide):
    run = run_of(network([3]))
    assert _captured(hide(torch.ones(2)), run)
    for method in (FedAvg(), FedProx(), Virtual(), FedSparse(), Mixture()):
        assert not _captured(method.loss(run), run)


class Holder:
    def __init__(self, kept):
        self.kept = kept

    def loss(self, *_):
        return self.kept

    __call__ = loss
