"""Frozen parameters are part of the common start: never sent, never changed, always there."""

from hashlib import sha256

import pytest
import torch

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.contracts import RoundContext
from fedbayes.core.messages import decode, encode
from fedbayes.errors import EngineError, FedbayesError, RunError
from fedbayes.federation.client_runtime import Task
from fedbayes.methods import METHODS
from fedbayes.models import build
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.calibrate.calibration import trust
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.export import export
from fedbayes.workflows.serve.model_evaluation import compare, open_model
from fedbayes.workflows.serve.model_files import read_with_card, write_model
from tests.helpers.cases import cases
from tests.helpers.toy_models import pretrained

WHOLE = 64 * 40 + 40 + 40 * 20 + 20 + 20 * 10 + 10
REST = WHOLE - 64 * 40 - 40
SEVERAL = {"mixture", "pvi", "fedgvi", "ivon-admm", "fedlap", "fedep", "pfedbayes", "fedbe"}
SEVERAL |= {"fedbe-sums", "hierarchical", "fedpm", "fald", "fedivon", "fens"}
SEVERAL |= {"predbayes", "qlsd", "dsvgd", "gaussian-head"}
"""Methods whose models are several networks, or means and deviations."""
TWOFOLD = SEVERAL - {"fedbe", "fedbe-sums", "hierarchical", "fedpm", "fald", "fens"}
TWOFOLD -= {"predbayes", "qlsd", "dsvgd", "gaussian-head"}
TWOFOLD |= {"scaffold", "scaffold-fedsparse"}
"""Methods that send two numbers for a weight."""


def settings(method, **more):
    return {
        "rounds": 2,
        "cohort": 2,
        "data": {"name": "digits", "clients": 3, "partition": "iid", "limit": 200},
        "model": {"name": "tests.helpers.toy_models:pretrained"},
        "metrics": [],
        "method": {"name": method},
        **more,
    }


@pytest.mark.parametrize("method", cases(METHODS, slow=("fedfuse", "fedgvi", "combined")))
def test_only_the_rest_is_sent_and_saved_and_the_whole_comes_back(method, tmp_path):
    if method in ("virtual", "pfnm", "gpi-fnm"):
        with pytest.raises(FedbayesError, match=r"1\.weight"):
            fedbayes.run(**settings(method))
        return
    with Simulation(Config.create(**settings(method)), tmp_path) as simulation:
        frozen = {n: t.clone() for n, t in simulation.network.constants.items()}
        message = simulation.method.message(simulation.server, RoundContext(simulation.run, 1))
        for _ in simulation:
            pass
    assert set(frozen) == {"1.weight", "1.bias"}
    assert not any("1.weight" in name or "1.bias" in name for name in message)
    run = fedbayes.Result(tmp_path)
    copies = 10 if method == "dsvgd" else 2 if method in TWOFOLD else 1
    if method not in ("local", "global", "combined", "hierarchical"):
        assert run.metrics[0]["bytes_down"] < 2 * (copies * REST * 4 + 1500)
    if not METHODS[method]().models.has_global:
        return
    assert not frozen.keys() & run.folder.model().keys()
    assert all(torch.equal(run.model[name], tensor) for name, tensor in frozen.items())
    if method not in SEVERAL:
        pretrained((1, 8, 8), 10).load_state_dict(run.model)
        assert run.summary["model_parameters"] == WHOLE


def test_training_is_that_of_pytorch():
    """One client, one step: the trained layers move as by hand, the frozen one stays."""
    config = Config.published(
        **settings("fedavg", rounds=1, cohort=1, training={"batch_size": 1000, "lr": 0.1})
    )
    with Simulation(config) as simulation:
        network, data = simulation.network, simulation.data
        (client,) = simulation.cohort_of(1)
        samples = data.train(client)
        module = pretrained((1, 8, 8), 10)
        module.load_state_dict(network.whole(network.initial))
        torch.nn.functional.cross_entropy(module(samples.x), samples.y).backward()
        (step,) = list(simulation)
        for name, parameter in module.named_parameters():
            if name in network.constants:
                assert parameter.grad is None
                assert torch.equal(network.constants[name], parameter)
            else:
                moved = parameter.detach() - 0.1 * parameter.grad
                torch.testing.assert_close(step.server.weights[name], moved)


@pytest.mark.parametrize("engine", cases(["workers", "flower-simulation"], slow=["workers"]))
def test_engines_agree(engine):
    if engine.startswith("flower"):
        pytest.importorskip("flwr")
    one = fedbayes.run(**settings("feddrop"))
    two = fedbayes.run(**settings("feddrop", engine=engine))
    assert all(torch.equal(one.model[name], two.model[name]) for name in one.model)


def test_a_client_with_other_frozen_weights_does_not_train():
    """Its start comes from elsewhere: another file, another version of the code."""
    with Simulation(Config.create(**settings("fedavg"))) as simulation:
        runtime = simulation.runtime
        data = encode(simulation.method.message(simulation.server, RoundContext(simulation.run, 1)))
        assert decode(
            runtime.train(Task(0, 1, data, None, runtime.run.network.constants_digest)).report
        )
        other = build(simulation.config.model, (1, 8, 8), 10, seed=1).constants_digest
        with pytest.raises(EngineError, match="frozen weights"):
            runtime.train(Task(0, 1, data, None, other))


def test_frozen_weights_that_changed_stop_a_resume(tmp_path, monkeypatch):
    """The factory may read a file, or draw otherwise in another version."""
    with Simulation(Config.create(**settings("fedavg")), tmp_path) as simulation:
        next(iter(simulation))

    def other(shape, classes):
        module = pretrained(shape, classes)
        module[1].weight.data += 1
        return module

    monkeypatch.setattr("tests.helpers.toy_models.pretrained", other)
    with pytest.raises(RunError, match="frozen weights"):
        fedbayes.resume(tmp_path)
    monkeypatch.undo()
    assert fedbayes.resume(tmp_path).summary["rounds"] == 2


@pytest.fixture
def other_backbone(monkeypatch):
    """From when it is called on, the factory makes other frozen weights."""

    def change():
        def other(shape, classes):
            module = pretrained(shape, classes)
            with torch.no_grad():
                module[1].weight.neg_()
            return module

        monkeypatch.setattr("tests.helpers.toy_models.pretrained", other)

    return change


def test_a_model_is_tried_with_the_frozen_weights_that_it_was_trained_with(
    tmp_path, other_backbone
):
    """Whoever builds the network anew has the same ones, by their digest, or is refused."""
    folder = tmp_path / "run"
    run = fedbayes.run(**settings("fedavg", rounds=5), folder=folder)
    with Simulation(None, folder) as simulation:
        raw = simulation.data.raw_test(0, 40)
    before = run.predictor()(raw)
    assert torch.equal(fedbayes.Result(folder).predictor()(raw), before)
    accuracy = run.summary["global_accuracy"]
    assert trust(folder).metrics["accuracy"] == pytest.approx(accuracy)
    export(folder, tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(program(raw.float()).log_softmax(-1), before)
    model = folder / "model.safetensors"
    tests = find_tests(model, folder, [])
    for network in (None, run.config.model):
        (score,) = compare({"m": open_model(model, tests, network)}, tests)
        assert score.metrics["accuracy"] == pytest.approx(accuracy)
    start = Config.create(**settings("fedavg", model={**settings("")["model"], "weights": model}))
    with Simulation(start) as simulation:
        whole = simulation.network.whole(simulation.network.initial)
    assert all(torch.equal(whole[name], tensor) for name, tensor in run.model.items())
    other_backbone()
    for refused in (
        lambda: fedbayes.Result(folder).predictor(),
        lambda: fedbayes.Result(folder).model,
        lambda: trust(folder),
        lambda: export(folder, tmp_path / "n.pt2"),
        lambda: open_model(model, tests, run.config.model),
        lambda: Simulation(start),
    ):
        with pytest.raises(FedbayesError, match="frozen weights"):
            refused()
    assert not (tmp_path / "n.pt2").exists()


def test_a_model_file_of_before_has_the_frozen_weights_in_it(tmp_path, other_backbone):
    """Whoever builds the network anew takes them from there."""
    folder = RunFolder(tmp_path / "run")
    run = fedbayes.run(**settings("fedavg"), folder=folder.path)
    with Simulation(None, folder.path) as simulation:
        raw = simulation.data.raw_test(0, 40)
    before, whole = run.predictor()(raw), run.model
    write_model(folder.model_file, whole)
    lines = folder.sums_file.read_text().splitlines()
    kept = [line for line in lines if not line.endswith("  model.safetensors")]
    digest = sha256(folder.model_file.read_bytes()).hexdigest()
    folder.sums_file.write_text("\n".join([*kept, f"{digest}  model.safetensors", ""]))
    other_backbone()
    assert torch.equal(fedbayes.Result(folder.path).predictor()(raw), before)


def test_a_clients_own_network_is_not_put_on_other_frozen_weights(tmp_path, other_backbone):
    folder = tmp_path / "run"
    fedbayes.run(**settings("local", cohort=3), folder=folder)
    trust(folder, personal=True)
    other_backbone()
    for refused in (
        lambda: trust(folder, personal=True),
        lambda: export(folder, tmp_path / "m.pt2", client="client-0"),
        lambda: fedbayes.Result(folder).predictor(client="client-0"),
    ):
        with pytest.raises(RunError, match="frozen weights"):
            refused()
    assert not (tmp_path / "m.pt2").exists()


def test_a_clients_own_network_in_the_run_folder_has_its_frozen_layer(tmp_path):
    run = fedbayes.run(**settings("local"), folder=tmp_path / "run")
    file = min(run.folder.clients.iterdir())
    weights, card = read_with_card(file)
    assert card is not None
    network = pretrained((1, 8, 8), 10)
    network.load_state_dict(weights)
    client = int(file.name.partition("-")[0])
    x = torch.rand(4, 1, 8, 8) * 16
    with torch.no_grad():
        logits = network(run.preprocessing.apply(x))
    assert card.temperature is not None
    cooled = logits / card.temperature
    torch.testing.assert_close(cooled.log_softmax(-1), run.predictor(client=client)(x))
