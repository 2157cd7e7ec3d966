"""Batch normalization that is each client's own: what FedBN is, and that it stays at home."""

import pytest
import torch
from torch import nn

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.contracts import RoundContext
from fedbayes.core.messages import decode, decode_file, encode
from fedbayes.errors import ConfigError, ModelError, RunError
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.stages.personal_layers import with_personal_layers
from fedbayes.methods.fedavg import FedAvg
from fedbayes.workflows.serve.export import export
from tests.helpers.own_layers import OWN, network, settings

OWN |= {"1.num_batches_tracked"}


def test_a_round_is_that_of_pytorch_by_hand():
    """Weights are averaged, what normalizes is not, and neither is it sent."""
    with Simulation(Config.create(**settings(rounds=1))) as simulation:
        net, data = simulation.network, simulation.data
        message = encode(
            simulation.method.message(simulation.server, RoundContext(simulation.run, 1))
        )
        assert set(decode(message)) == {"2.weight", "2.bias"} == set(net.initial)
        assert set(net.own) == OWN
        by_hand, sizes = [], data.train_sizes()
        for client in range(2):
            module = network((1, 8, 8), 10)
            module.load_state_dict(net.start)
            samples = data.train(client)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            nn.functional.cross_entropy(module.train()(samples.x), samples.y).backward()
            optimizer.step()
            by_hand.append(module.state_dict())
            outcome = simulation.runtime.train(Task(client, 1, message, None))
            assert set(decode(outcome.report)) - {"/weight"} == {"2.weight", "2.bias"}
            kept = {n.removeprefix("own/"): t for n, t in decode_file(outcome.state).items()}
            assert kept.keys() == OWN
            for name in OWN:
                torch.testing.assert_close(kept[name], by_hand[-1][name])
        assert not torch.equal(by_hand[0]["1.running_mean"], by_hand[1]["1.running_mean"])
        (step,) = list(simulation)
    for name, tensor in step.server.weights.items():
        one, two = (float(n) / float(sizes.sum()) for n in sizes)
        torch.testing.assert_close(tensor, one * by_hand[0][name] + two * by_hand[1][name])


def test_the_method_behind_gets_the_samples_of_the_client():
    found = []

    class Looking(FedAvg):
        def problem(self, message, client, samples, at):
            found.append(samples)
            return super().problem(message, client, samples, at)

    method = with_personal_layers(Looking())
    with Simulation(Config.create(**settings(rounds=1))) as simulation:
        at, samples = RoundContext(simulation.run, 1, client=0), simulation.data.train(0)
        message = method.message(method.init(simulation.run), at)
        method.problem(message, method.join(at), samples, at)
    assert found == [samples]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedadam", "scaffold"])
def test_alone_in_the_world_it_makes_no_difference(method, tmp_path):
    """One client: its own layers are everybody's."""
    kind = {"name": "tests.helpers.own_layers:network"}
    data = {"name": "digits", "clients": 1, "partition": "iid", "limit": 120}
    rest = {"data": data, "rounds": 3, "method": {"name": method}}
    if method == "fedadam":  # whose server moves running means otherwise than weights
        rest["rounds"] = 1
    one = fedbayes.run(**settings(**rest, model={**kind, "batch_norm": "averaged"}))
    two = fedbayes.run(**settings(**rest), folder=tmp_path / "run")
    assert two.metrics[-1]["local_accuracy"] == one.metrics[-1]["local_accuracy"]
    assert two.metrics[-1]["bytes_up"] < one.metrics[-1]["bytes_up"]


def test_only_clients_have_models(tmp_path):
    run = fedbayes.run(**settings(), folder=tmp_path / "run")
    assert run.summary["headline"].startswith("local")
    assert not run.folder.model_file.exists()
    with pytest.raises(RunError, match="has no global model"):
        export(tmp_path / "run", tmp_path / "m.pt2")
    x = torch.rand(5, 1, 8, 8) * 16
    answers = [run.predictor(client=client)(x) for client in (0, 1)]
    assert not torch.allclose(*answers)
    export(tmp_path / "run", tmp_path / "m.pt2", client=1)
    program = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(program(x).log_softmax(-1), answers[1], rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    with Simulation(Config.create(**settings(rounds=3)), tmp_path / "run") as simulation:
        next(iter(simulation))
    resumed = fedbayes.resume(tmp_path / "run")
    whole = fedbayes.run(**settings(rounds=3), folder=tmp_path / "whole")
    x = torch.rand(5, 1, 8, 8) * 16
    for client in (0, 1):
        assert torch.equal(resumed.predictor(client=client)(x), whole.predictor(client=client)(x))


@pytest.mark.parametrize("method", ["fedsparse", "local", "virtual", "fedpa", "pfedbayes"])
def test_methods_without_whole_averages_are_refused(method):
    with pytest.raises(ConfigError, match=r"fedavg, .*not with"):
        fedbayes.run(**settings(method={"name": method}))
    with pytest.raises(ConfigError, match="path"):
        fedbayes.run(**settings(method={"name": "scaffold", "control": "gradient"}))
    with pytest.raises(ModelError, match="no batch normalization"):
        fedbayes.run(**settings(model={"batch_norm": "local"}))
