"""The contract carries what later methods need: see `toy_methods`."""

import torch

import fedbayes
from fedbayes import Simulation
from fedbayes.messages import decode, dense
from fedbayes.tensors import unpack
from fedbayes.testing import MethodContract
from tests.toy_methods import Control, Visits


class TestMedian(MethodContract):
    method = "tests.toy_methods:Median"


class TestGrowing(MethodContract):
    method = "tests.toy_methods:Growing"

    def test_the_model_grows_and_each_client_gets_its_own(self, tmp_path):
        run = fedbayes.run(self.config(rounds=3), tmp_path)
        assert [line["width"] for line in run.metrics] == [9, 10, 11]
        assert run.model["1.weight"].shape == (11, 64)
        assert run.summary["model_parameters"] == 11 * 64 + 11 + 11 * 10 + 10

    def test_private_state_counts_visits(self, tmp_path):
        with Simulation(self.config(rounds=4, cohort=4), tmp_path) as simulation:
            visits = [step.metrics["visits"] for step in simulation]
            states = {c: unpack(Visits, dense(decode(s))) for c, s in simulation.states.items()}
        assert visits == [1, 2, 3, 4]
        assert len(states) == 4
        owns = {tuple((state.own - state.count).tolist()) for state in states.values()}
        assert len(owns) == 4, "each client joins with a stream of its own"


class TestControlled(MethodContract):
    method = "tests.toy_methods:Controlled"

    def test_control_variates_sum_to_the_servers(self, tmp_path):
        with Simulation(self.config(rounds=5), tmp_path) as simulation:
            list(simulation)
            states = [unpack(Control, dense(decode(s))) for s in simulation.states.values()]
            for name, total in simulation.server.control.items():
                summed = torch.stack([state.control[name] for state in states]).sum(dim=0)
                torch.testing.assert_close(total, summed, rtol=1e-4, atol=1e-6)


class TestHalfSilent(MethodContract):
    method = "tests.toy_methods:HalfSilent"

    def test_half_the_bytes_and_half_the_model(self, tmp_path):
        half = fedbayes.run(self.config(model={"hidden": [200]}), tmp_path / "half")
        settings = {"model": {"hidden": [200]}, "method": {"name": "fedavg"}}
        full = fedbayes.run(self.config(**settings), tmp_path / "full")
        assert half.summary["bytes_down"] < 0.52 * full.summary["bytes_down"]
        assert half.summary["bytes_up"] < 0.52 * full.summary["bytes_up"]
        assert half.summary["sparsity"] > 0.49
