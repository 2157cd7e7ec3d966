"""Models from files on test data: `fedbayes evaluate` and what is behind it."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedbayes
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.data import DataSettings, FederatedData, load_dataset, partition
from fedbayes.data.preprocessing import Preprocessing
from fedbayes.errors import DataError, FedbayesWarning, ModelError, RunError
from fedbayes.fusion import coordinate_average
from fedbayes.fusion.class_counts import RESTART
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import MLP, dense_layers, relu_network
from fedbayes.workflows.serve.evaluation_set import EvaluationSet
from fedbayes.workflows.serve.model_evaluation import Candidate, _taught, compare
from fedbayes.workflows.serve.model_files import (
    each_once,
    read_counts,
    read_models,
    read_with_card,
    shared_card,
)
from tests.helpers.command_line import cli, command


@pytest.fixture(scope="module")
def tests():
    settings = DataSettings(partition="iid", clients=3)
    dataset = load_dataset(settings)
    data = FederatedData(dataset, partition(dataset, settings, 0), 0)
    raw = data.raw_test(0, data.test_total)
    labels = torch.as_tensor(data.test_labels())
    likelihood = build_likelihood("auto", data.target)
    samples = Samples(raw, labels)
    return EvaluationSet(samples, "digits", data.preprocessing, "as they are", likelihood)


def networks(tests, *widths, inputs=64):
    torch.manual_seed(0)
    found = {}
    for index, width in enumerate(widths):
        layers = dense_layers(MLP(inputs, [width], 10).state_dict(), "m")
        size = sum(layer.weight.numel() + layer.bias.numel() for layer in layers)

        def predict(x, layers=layers):
            return relu_network(layers, tests.preprocessing.apply(x))[None]

        found[str(index)] = Candidate(
            predict, tests.likelihood, size, tests.preprocessing, "so", layers
        )
    return found


def test_ensembles_by_hand(tests):
    models = networks(tests, 5, 6)
    counts = np.array([[1] * 9 + [0], [3] * 5 + [0] * 5])
    scores = {s.name: s for s in compare(models, tests, inputs=["0", "1"], counts=counts)}
    x, y = tests.samples
    mean, std = tests.preprocessing.mean[0], tests.preprocessing.std[0]
    x = (x / 16 - mean) / std
    soft = []
    for model in models.values():
        hidden = torch.relu(x.flatten(1) @ model.layers[0].weight.T + model.layers[0].bias)
        soft.append((hidden @ model.layers[1].weight.T + model.layers[1].bias).softmax(1))
    uniform = (soft[0] + soft[1]) / 2
    # Nobody saw the last class, and says as much of it as the other.
    shares = torch.tensor([[0.25] * 5 + [1.0] * 4 + [0.5], [0.75] * 5 + [0.0] * 4 + [0.5]])
    weighted = soft[0] * shares[0] + soft[1] * shares[1]
    # A sum of logits without each client's frequencies of classes (one more sample of each), at a
    # temperature by the deviation of log p over the classes, each client's with its mean share.
    deviations = torch.stack([p.log().std(1, correction=0, keepdim=True) for p in soft])
    mean_share = shares.mean(1)[:, None, None]
    deviation = (mean_share * deviations.log()).sum(0).exp()
    t = 1 + 0.6 * deviation
    level = [t * p.pow(1 / t).sum(1, keepdim=True).log() for p in soft]
    own = (torch.tensor(counts) + 1.0) / (torch.tensor(counts) + 1.0).sum(1, keepdim=True)
    of_all = (counts + 1.0).sum(0) / (counts + 1.0).sum()
    freed = torch.as_tensor(of_all).log() + sum(
        share * (p.log() - whose - frequency.log())
        for share, p, whose, frequency in zip(shares, soft, level, own, strict=True)
    )
    # And the stationary distribution of a chain over classes, which leaves a class that nobody has
    # by way of all clients.
    had = torch.tensor(counts).double()
    leave = torch.where(had.sum(0) > 0, had / had.sum(0).clamp_min(1), had.sum(1, True) / had.sum())
    warm = [(p.double().log() / (1 + 0.4 * deviation)) for p in soft]
    warm = [
        q.masked_fill(row == 0, -torch.inf).softmax(1) for q, row in zip(warm, had, strict=True)
    ]
    chain = sum(q[:, :, None] * row for q, row in zip(warm, leave, strict=True))
    frequencies = RESTART * (had.sum(0) + 2) / (had + 1).sum()
    stationary = torch.linalg.solve(
        torch.eye(10) - (1 - RESTART) * chain, frequencies.expand(len(y), -1)
    )
    learnt = ((freed.log_softmax(1) + stationary.log()) / 2).softmax(1).float()
    found = ("uniform", uniform), ("by class share", weighted), ("as fuse learns it", learnt)
    for name, p in found:
        p = p / p.sum(1, keepdim=True)
        score = scores[f"ensemble, {name}"]
        assert score.metrics["accuracy"] == pytest.approx(float((p.argmax(1) == y).double().mean()))
        assert score.metrics["nll"] == pytest.approx(
            float(-p[torch.arange(len(y)), y].log().mean()), rel=1e-5
        )
        assert score.rows == len(y)
    assert "average of the inputs" not in scores  # 5 and 6 units have no average
    assert scores["ensemble, uniform"].parameters == 64 * 11 + 11 + 10 * 11 + 20


def test_the_average_is_weight_by_weight(tests):
    models = networks(tests, 5, 5, 5)
    average = coordinate_average([model.layers for model in models.values()])
    for depth, layer in enumerate(average):
        weights = [model.layers[depth].weight.numpy() for model in models.values()]
        np.testing.assert_allclose(layer.weight.numpy(), np.mean(weights, axis=0), rtol=1e-6)
    names = [s.name for s in compare(models, tests, inputs=list(models))]
    assert "average of the inputs" in names


def test_models_that_do_not_fit_the_data(tests):
    with pytest.raises(ModelError, match="0 maps 9 inputs to 10 classes, digits has 64"):
        compare(networks(tests, 3, inputs=9), tests)
    with pytest.raises(ModelError, match="counts"):
        compare(networks(tests, 3), tests, inputs=["0"], counts=np.ones((2, 10), dtype=np.int64))


@pytest.mark.parametrize("key", ["{folder}/a.safetensors", "a.safetensors", "a"])
def test_counts_by_name_and_by_order(tmp_path, key):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"b": [0, 5], key.format(folder=tmp_path): [2, 3]}))
    assert read_counts(path, files).tolist() == [[2, 3], [0, 5]]
    path.write_text("[[2, 3], [0, 5]]")
    assert read_counts(path, files).tolist() == [[2, 3], [0, 5]]


@pytest.mark.parametrize(
    "content",
    ["", "{}", "3", "[[1, 2]]", "[[1, 2], [3]]", "[[1, 2], [3, -1]]", "[[1], [0]]", '[["a"], [1]]'],
)
def test_counts_that_do_not_fit(tmp_path, content):
    path = tmp_path / "counts.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"counts\.json"):
        read_counts(path, [tmp_path / "a.pt", tmp_path / "b.pt"])


def test_fused_models_are_compared_with_their_inputs_in_any_order(tmp_path, capsys):
    run = tmp_path / "run"
    fedbayes.run(method="local", data={"clients": 2}, rounds=1, folder=run, progress=False)
    files, fused = sorted((run / "clients").iterdir()), tmp_path / "fused.safetensors"
    assert cli(capsys, "fuse", *files, "-o", fused, "--method", "average")[0] == 0
    other = tmp_path / "other.safetensors"
    assert cli(capsys, "fuse", *files, "-o", other, "--method", "permute")[0] == 0
    page, found = tmp_path / "page.html", []
    for order in ([*files, fused, other], [fused, *files, other], [other, fused, *files]):
        given = ["evaluate", *order, "--run", run, "--json", "--report", page]
        code, out, _ = cli(capsys, *given)
        assert code == 0
        found.append({one["name"]: one["nll"] for one in json.loads(out)})
    assert found[0] == found[1] == found[2]
    assert found[0]["average of the inputs"] == pytest.approx(found[0][str(fused)])
    told = page.read_text()
    assert all(f'data-value="{name}"' in told for name in found[0])
    assert "fused by average" in told
    # Either could have been fused from the other, so it is said whose ensemble it is.
    _, out, _ = cli(capsys, "evaluate", fused, other, *files, "--run", run)
    assert f"average and ensemble use {files[0].name}, {files[1].name}" in out
    code, _, err = cli(capsys, "evaluate", fused, "--run", run, "--report", "page.txt")
    assert (code, "FILE.html" in err) == (2, True)


def test_a_model_counts_once(tmp_path):
    save_file(MLP(64, [3], 10).state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="given twice"):
        read_models([tmp_path / "a.safetensors"] * 2)


def test_columns_in_another_order_are_no_matter_of_standardization(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {"a": rng.normal(size=40), "b": rng.normal(3, 2, 40), "y": ["n", "m"] * 20}
    )
    cards = {}
    for name, columns in (("one", ["a", "b", "y"]), ("two", ["b", "a", "y"])):
        table[columns].to_csv(tmp_path / f"{name}.csv", index=False)
        data = {"path": tmp_path / f"{name}.csv", "label": "y", "clients": 1}
        run = fedbayes.run(data=data, rounds=1, out=tmp_path / name)
        _, cards[tmp_path / name] = read_with_card(run.folder.path / "model.safetensors")
    with pytest.raises(ModelError, match=r"another order of them.*data.features sets columns"):
        shared_card(cards)


def test_a_copy_of_a_model_under_another_name_is_warned_of(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(seed)
        save_file(MLP(64, [3], 10).state_dict(), tmp_path / f"{name}.safetensors")
    with pytest.warns(FedbayesWarning) as warned:
        each_once([tmp_path / f"{name}.safetensors" for name in "abc"], 2)
    (told,) = [str(one.message) for one in warned]
    assert re.search(r"b\.safetensors is a copy of .*a\.safetensors, so its client counts", told)


def test_the_models_of_a_run(tmp_path, monkeypatch, capsys):
    run = fedbayes.run(
        method={"name": "local"}, data={"clients": 3}, rounds=5, folder=tmp_path / "run"
    )
    with pytest.raises(RunError, match="only clients have models"):
        _ = run.model
    model, *clients = sorted(run.folder.clients.iterdir())
    code, out, err = cli(capsys, "evaluate", model, *clients, "--run", tmp_path / "run", "--json")
    assert code == 0
    assert not err
    scores = {s["name"]: s for s in json.loads(out)}
    for width in (50, 250):
        monkeypatch.setenv("COLUMNS", str(width))
        _, told, _ = cli(capsys, "evaluate", model, *clients, "--run", tmp_path / "run")
        table = told[told.index("┏") : told.rindex("└")]
        assert max(map(len, table.splitlines())) <= width
        assert all(f"{score['brier']:.4f}" in table for score in scores.values()), "cut off"
    assert "worst client" in table
    worst = min(own["accuracy"] for own in scores[str(model)]["clients"].values())
    assert f"{worst:.4f} (" in table
    assert run.summary["global_accuracy"] is None
    ensemble = scores["ensemble, uniform"]
    assert ensemble["accuracy"] > scores[str(clients[0])]["accuracy"]
    _, out, _ = cli(
        capsys, "evaluate", clients[0], model, clients[1], "--run", tmp_path / "run", "--json"
    )
    again = {s["name"]: s for s in json.loads(out)}["ensemble, uniform"]
    assert again["nll"] == pytest.approx(ensemble["nll"]), "the first is not in it"

    code, out, err = cli(capsys, "evaluate", model, "--dataset", "digits")
    assert code == 0
    assert "no official test part" in err
    code, _, err = cli(capsys, "evaluate", tmp_path / "absent.pt")
    assert code == 2
    assert "absent.pt" in err


@pytest.mark.parametrize(
    ("shape", "mean", "mirrored"),
    [((3, 6, 6), 0.5, True), ((1, 6, 6), 0.5, False), ((3, 6, 6), 5.0, True), ((9,), 0.5, False)],
)
def test_photographs_are_seen_in_a_mirror_too(shape, mean, mirrored):
    """As `fuse` does it by its defaults, whatever their range."""
    target = Target("class", ("cat", "dog", "owl"))
    seen = Preprocessing(shape, 1.0, (mean,) * shape[0], (0.25,) * shape[0], target)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(int(np.prod(shape)), 3) for _ in range(2)]
    found = []
    for layer in layers:
        weight = layer.weight.data.reshape(3, *shape)
        weight += 0.5 * weight.flip(-1)  # much the same in a mirror
        found.append(
            Candidate(
                lambda x, own=layer: own(seen.apply(x).flatten(1))[None],
                build_likelihood("auto", target), 0, seen, "so",
            )
        )  # fmt: skip
    counts = np.array([[9, 4, 1], [2, 5, 6]])
    both = _taught(found, ["a", "b"], True, counts, mirrored=True)
    apart = _taught(found, ["a", "b"], True, counts, mirrored=False)
    x = torch.rand(4, *shape)
    assert both.note == apart.note + "; each image counts with its mirror image" * mirrored
    with torch.no_grad():
        wanted = apart.draw(x)[0].log_softmax(1)
        if mirrored:
            wanted = (wanted + apart.draw(x.flip(-1))[0].log_softmax(1)) / 2
        torch.testing.assert_close(both.draw(x)[0].log_softmax(1), wanted.log_softmax(1))


def test_stray_samples_of_a_class_do_not_mislead_the_teacher(tmp_path, capsys):
    """Two classes for each client and up to six samples of a third."""
    data = {"partition": "shards", "shards_per_client": 1, "clients": 5}
    run = fedbayes.run(method="local", rounds=3, seed=0, data=data, out=tmp_path / "run")
    files = sorted(run.folder.clients.iterdir())
    code, out, _ = cli(capsys, "evaluate", *files, "--run", tmp_path / "run", "--json")
    assert code == 0
    scores = {score["name"]: score["accuracy"] for score in json.loads(out)}
    assert scores["ensemble, as fuse learns it"] > scores["ensemble, by class share"]


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_any_precision_are_tried_in_single(tmp_path, capsys, kind):
    torch.manual_seed(0)
    state = MLP(64, [12], 10).state_dict()
    paths = [tmp_path / f"{name}.safetensors" for name in ("own", "single")]
    for path, last in zip(paths, (torch.float32, kind), strict=True):
        save_file({name: tensor.to(kind).to(last) for name, tensor in state.items()}, path)
    for network in ((), ("--model", "mlp", "--set", "model.hidden=[12]")):
        code, out, _ = cli(capsys, "evaluate", *paths, "--dataset", "digits", "--json", *network)
        assert code == 0
        one, two, *_ = json.loads(out)
        assert (one["accuracy"], one["nll"]) == (two["accuracy"], two["nll"])
    x = torch.rand(5, 64)
    layers = dense_layers({name: tensor.to(kind) for name, tensor in state.items()}, "m")
    assert relu_network(layers, x).dtype == torch.float32


def test_a_program_of_other_inputs_is_refused(tmp_path, capsys):
    for module, x in (
        (torch.nn.Linear(64, 10), torch.zeros(2, 64)),
        (
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).double(),
            torch.zeros(2, 1, 8, 8).double(),
        ),
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)), torch.zeros(2, 1, 8, 8)),
    ):
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "m.pt2")
        code, _, err = cli(capsys, "evaluate", tmp_path / "m.pt2", "--dataset", "digits")
        assert code == 2
        assert "no logits of 10 classes for samples of shape (n, 1, 8, 8)" in " ".join(err.split())


def test_weights_of_other_names_are_told_with_the_way_out(tmp_path, capsys):
    save_file({"fc.weight": torch.zeros(10, 64), "fc.bias": torch.zeros(10)}, tmp_path / "m.st")
    arguments = ("evaluate", tmp_path / "m.st", "--dataset", "digits", "--model", "mlp")
    code, _, err = cli(capsys, *arguments)
    assert code == 2
    told = " ".join(err.split())
    assert "it has fc.bias (10), fc.weight (10 x 64), but 1.weight (100 x 64)" in told
    assert "save the state_dict of the network that the config builds" in told


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("suffix", ["safetensors", "pt2"])
def test_evaluate_gives_what_fuse_gives_on_the_same_pictures(tmp_path, capsys, scaled, suffix):
    """Pictures of 8 bits, networks trained elsewhere: `fuse --test`, `evaluate` and PyTorch."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 90)
    x = (rng.integers(0, 60, (90, 8, 8)) + 60 * y[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "test.npz", x=x, y=y)
    for seed in (0, 1):
        torch.manual_seed(seed)
        torch.save(MLP(64, [9], 3).state_dict(), tmp_path / f"{seed}.pt")
    out, test = tmp_path / f"fused.{suffix}", tmp_path / "test.npz"
    numbers = ("--mean", "0.4", "--std", "0.2") if scaled else ()
    words = ("--method", "function", "--shape", "1,8,8", "--minutes", "0", "--test", test)
    models = (tmp_path / "0.pt", tmp_path / "1.pt")
    code, told, err = cli(capsys, "fuse", *models, "-o", out, *words, *numbers, "--json")
    assert code == 0, err
    fused = json.loads(told)["frontier"][0]
    # What is known is in the fused file, if it has a card: a program has one anyway.
    numbers = () if suffix == "pt2" or scaled else numbers
    code, told, err = cli(capsys, "evaluate", out, "--set", f"data.path={test}", "--json", *numbers)
    assert code == 0, err
    (score,) = json.loads(told)
    assert score["nll"] == pytest.approx(fused["nll"], abs=1e-5)
    assert score["accuracy"] == fused["accuracy"]
    raw = torch.from_numpy(x).float().flatten(1) / 255
    if suffix == "pt2":
        logits = torch.export.load(out).module()(raw.reshape(-1, 1, 8, 8))
    else:
        layers = dense_layers(load_file(out), "m")
        logits = relu_network(layers, (raw - 0.4) / 0.2 if scaled else raw)
    nll = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y))
    assert score["nll"] == pytest.approx(float(nll), abs=1e-5)
    if not scaled:  # of files without a card those that count as clients are named
        code, told, _ = cli(capsys, "evaluate", out, *models, "--set", f"data.path={test}")
        assert "average and ensemble use 0.pt, 1.pt" in told


def test_images_out_of_range_are_rejected_by_weights_and_programs(tmp_path, capsys):
    """Those of 8 bits are brought into the range of training first."""
    rng = np.random.default_rng(0)
    x, y = rng.random((40, 8, 8)).astype(np.float32), np.arange(40) % 3
    for seed in (0, 1):
        torch.manual_seed(seed)
        torch.save(MLP(64, [9], 3).state_dict(), tmp_path / f"{seed}.pt")
    models = [tmp_path / "0.pt", tmp_path / "1.pt"]
    words = ("--method", "function", "--shape", "1,8,8", "--minutes", "0", "--mean", "0.5")
    for suffix in ("pt", "pt2"):
        assert command("fuse", *models, "-o", tmp_path / f"g.{suffix}", *words) == 0
    capsys.readouterr()
    found = {}
    for name, values in (("unit", x), ("wide", 16 * x), ("eight", (255 * x).astype(np.uint8))):
        np.savez(tmp_path / f"{name}.npz", x=values, y=y)
        for suffix in ("pt", "pt2"):
            data = f"data.path={tmp_path / name}.npz"
            code, out, err = cli(
                capsys, "evaluate", tmp_path / f"g.{suffix}", "--set", data, "--json"
            )
            assert code == (2 if name == "wide" else 0), err
            assert "Give raw images" in err if code else "unscaled" not in err
            found[name, suffix] = None if code else json.loads(out)[0]["nll"]
    for name in ("unit", "eight"):
        assert found[name, "pt"] == pytest.approx(found[name, "pt2"], abs=1e-6)
        assert found[name, "pt"] == pytest.approx(found["unit", "pt"], abs=1e-2)


def test_fused_programs_are_no_clients(tmp_path, capsys):
    y = np.arange(30) % 3
    np.savez(tmp_path / "t.npz", x=np.random.default_rng(0).random((30, 4), np.float32), y=10 * y)
    clients = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        program = torch.export.export(
            MLP(4, [5], 3).eval(),
            (torch.zeros(3, 4),),
            dynamic_shapes=({0: torch.export.Dim("n")},),
        )
        clients.append(tmp_path / f"c{seed}.pt2")
        torch.export.save(program, clients[-1])
    table = pd.DataFrame(np.random.default_rng(1).random((30, 4)), columns=list("abcd"))
    table.assign(label=y).to_csv(tmp_path / "rows.csv", index=False)
    assert command("sums", "--data", tmp_path / "rows.csv", "-o", tmp_path / "s.json") == 0
    words = ("--shape", "4", "--classes", "3", "--minutes", "0", "--sums", tmp_path / "s.json")
    assert command("fuse", *clients, "-o", tmp_path / "g.pt2", *words) == 0
    capsys.readouterr()
    (tmp_path / "n.json").write_text("[[5, 4, 3], [3, 4, 5]]")
    files = (clients[0], tmp_path / "g.pt2", clients[1], "--counts", tmp_path / "n.json")
    page = tmp_path / "page.html"
    data = f"data.path={tmp_path / 't.npz'}"
    code, out, err = cli(capsys, "evaluate", *files, "--set", data, "--report", page)
    assert code == 0, err
    assert "average and ensemble use c0.pt2, c1.pt2" in out
    assert "fused by function" in page.read_text()
    told = " ".join(err.split())
    assert "files that do not name their classes. Outputs are read as 0, 10, 20" in told


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.Dropout(0.5)], ids=["norm", "dropout"])
def test_a_program_exported_in_training_raises_an_error(layer, tmp_path, capsys):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4))
    table = pd.DataFrame(x, columns=list("abcd")).assign(label=np.where(x[:, 0] > 0, "yes", "no"))
    table.to_csv(tmp_path / "rows.csv", index=False)
    network = nn.Sequential(nn.Linear(4, 8), layer, nn.ReLU(), nn.Linear(8, 2))
    many = ({0: torch.export.Dim("n", min=1)},)
    rows = ("--set", f"data.path={tmp_path / 'rows.csv'}")
    for training in (True, False):
        network.train(training)
        path = tmp_path / f"{training}.pt2"
        torch.export.save(
            torch.export.export(network, (torch.zeros(3, 4),), dynamic_shapes=many), path
        )
        assert command("evaluate", path, *rows) == (2 if training else 0)
        said = capsys.readouterr().err
        assert ("Call model.eval() before torch.export" in said) == training


def test_of_numbers_the_teacher_is_the_mixture_by_samples(tmp_path, capsys):
    """As `fuse --counts` learns it; without counts all models have one weight."""
    data = {"name": "diabetes", "clients": 2}
    run = fedbayes.run(method="local", rounds=2, seed=0, data=data, out=tmp_path / "run")
    files = sorted(run.folder.clients.iterdir())
    asked = ("evaluate", *files, "--run", tmp_path / "run", "--json")
    _, out, _ = cli(capsys, *asked)
    assert "ensemble, as fuse learns it" not in {score["name"] for score in json.loads(out)}
    counts = tmp_path / "counts.json"
    found = {}
    for own in ([[90], [10]], [[50], [50]], [[100], [1]]):
        counts.write_text(json.dumps(own))
        code, out, err = cli(capsys, *asked, "--counts", counts)
        assert code == 0, err
        found[own[0][0]] = {score["name"]: score for score in json.loads(out)}
    scores = found[50]
    assert "ensemble, by class share" not in scores
    name = "ensemble, as fuse learns it"
    assert scores[name]["rmse"] == pytest.approx(scores["ensemble, uniform"]["rmse"], rel=1e-5)
    first = scores[str(files[0])]["rmse"]
    assert abs(found[100][name]["rmse"] - first) < abs(found[90][name]["rmse"] - first)
    counts.write_text("[[9, 1], [5, 5]]")
    code, _, err = cli(capsys, *asked, "--counts", counts)
    assert code == 2
    assert "one number, its samples" in err


def test_log_risks_have_no_teacher(tmp_path, capsys):
    """They are relative, so there is no mean of them; the other rows are there all the same."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 2))
    rows = np.column_stack([x, rng.exponential(np.exp(-x[:, 0])), rng.random(80) < 0.7])
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,days,died", comments="")
    data = {"path": str(tmp_path / "t.csv"), "label": ["days", "died"], "clients": 2}
    task = {"likelihood": "cox"}
    run = fedbayes.run(method="local", rounds=1, data=data, task=task, out=tmp_path / "run")
    (tmp_path / "n.json").write_text("[[40], [20]]")
    files = sorted(run.folder.clients.iterdir())
    asked = ("--run", tmp_path / "run", "--counts", tmp_path / "n.json", "--json")
    code, out, err = cli(capsys, "evaluate", *files, *asked)
    assert code == 0, err
    names = [score["name"] for score in json.loads(out)]
    assert names[-1] == "ensemble, uniform"
    assert "there is no row 'ensemble, as fuse learns it'" in " ".join(err.split())
