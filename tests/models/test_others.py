"""Networks that others trained: what they compute, what of them trains, and what of it travels."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.contracts import RoundContext
from fedbayes.core.messages import decode, encode
from fedbayes.data.tokens import Tokens
from fedbayes.errors import ConfigError, DataError, FedbayesError, ModelError, RunError
from fedbayes.federation.client_runtime import Task
from fedbayes.models import ModelSettings, build
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.export import export
from fedbayes.workflows.serve.model_evaluation import compare, open_model
from tests.helpers.others import available, write_image_network, write_text_network, write_texts

if not (available("transformers") and available("peft")):
    pytest.skip("the extra hf is not installed", allow_module_level=True)
TEXTS = ["the pain was good", "fever", "the pain was awful not a fine is very mild"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_text_network(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return write_image_network(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "notes.csv")


def settings(bert, texts, **more):
    model = {"name": "transformers", "pretrained": str(bert), "trains": "lora", "lora_rank": 4}
    data = {"path": texts, "label": "outcome", "group": "site", "tokens": "note", "max_tokens": 12}
    table = {"rounds": 2, "data": data, "model": {**model, **more.pop("model", {})}}
    return {**table, "training": {"lr": 0.1}, **more}


def network(folder, shape=(12,), **model):
    chosen = ModelSettings(name="transformers", pretrained=str(folder), **model)
    return build(chosen, shape, 3, seed=0)


def of_transformers(bert, weights):
    """The network as `transformers` builds it, with weights under the names here."""
    from transformers import AutoModelForSequenceClassification

    found = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3).eval()
    head = {n: t for n, t in found.state_dict().items() if n.startswith("classifier")}
    found.load_state_dict({n: weights[f"network.{n}"] for n in head}, strict=False)
    return found


def test_texts_are_read_as_the_tokenizer_and_the_network_do_by_themselves(bert):
    """Padding and its mask are in the sample: outputs are those of each text alone."""
    from transformers import AutoTokenizer

    net = network(bert)
    ids = Tokens.of("note", str(bert), 12).encode(TEXTS, "here")
    theirs, tokenizer = of_transformers(bert, net.initial), AutoTokenizer.from_pretrained(bert)
    with torch.no_grad():
        ours = net(net.initial, torch.from_numpy(ids).float())
        for row, text in enumerate(TEXTS):
            tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=12)
            assert ids[row][ids[row] >= 0].tolist() == tokens["input_ids"][0].tolist()
            torch.testing.assert_close(ours[row], theirs(**tokens).logits[0], rtol=1e-4, atol=1e-5)


def test_adapters_add_the_product_of_their_factors(bert):
    net = network(bert, trains="lora", lora_rank=4, lora_alpha=6)
    rng = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(t.shape, generator=rng) * 0.3 for n, t in net.initial.items()}
    assert all(".lora_" in name or "classifier" in name for name in weights)
    theirs = of_transformers(bert, weights)
    for name, a in weights.items():
        if ".lora_A." in name:
            b = weights[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("network.").partition(".lora_A")[0]
            with torch.no_grad():
                theirs.get_parameter(f"{layer}.weight").add_(6 / 4 * b @ a)
    x = torch.from_numpy(Tokens.of("note", str(bert), 12).encode(TEXTS, "here"))
    with torch.no_grad():
        wanted = theirs(x.long().clamp(min=0), attention_mask=(x >= 0).long()).logits
        torch.testing.assert_close(net(weights, x.float()), wanted, rtol=1e-3, atol=1e-4)


def test_a_run_sends_and_stores_the_adapters_and_little_more(tmp_path, texts):
    """At the size of a small transformer (two layers of 128): 1.02 times their bytes at most."""
    big = write_text_network(tmp_path / "big", hidden=128)
    config = settings(big, texts, model={"lora_rank": 8})
    run = fedbayes.run(**config, folder=tmp_path / "run")
    stored = run.folder.model()
    adapters = 4 * (2 * 2 * 2 * 128 * 8 + 2 * 128 + 2)
    assert sum(t.numel() * t.element_size() for t in stored.values()) == adapters
    for line in run.metrics:
        for way in ("bytes_up", "bytes_down"):
            assert adapters < line[way] / 3 < 1.02 * adapters
    whole = sum(t.numel() for t in run.model.values())
    assert whole > 15 * adapters / 4
    assert run.folder.model_file.stat().st_size < adapters + 6000
    assert sum(file.stat().st_size for file in run.folder.path.rglob("*")) < 2 * adapters + 44_000


@pytest.mark.slow
def test_the_whole_network_comes_back_beside_the_same_base_alone(tmp_path, bert, texts):
    base = shutil.copytree(bert, tmp_path / "base")
    folder = tmp_path / "run"
    run = fedbayes.run(**settings(base, texts), folder=folder)
    answers = run.predictor()(TEXTS)
    model = folder / "model.safetensors"
    tests = find_tests(model, folder, [])
    (score,) = compare({"m": open_model(model, tests)}, tests)
    assert score.metrics["accuracy"] == pytest.approx(run.summary["global_accuracy"])
    fresh = find_tests(model, None, [f"data.path={texts}", "data.label=outcome"])
    assert len(fresh.samples.y) == 90
    export(folder, tmp_path / "whole.pt2")
    ids = torch.from_numpy(run.preprocessing.tokens.encode(TEXTS, "here"))
    program = torch.export.load(tmp_path / "whole.pt2").module()
    torch.testing.assert_close(program(ids.float()).log_softmax(-1), answers, rtol=1e-4, atol=1e-5)
    table = pd.read_csv(texts, keep_default_na=False)
    predicted = fedbayes.load(folder).predict_frame(table)
    assert list(predicted.columns[:2]) == ["site", "outcome"]
    wanted = run.predictor()(list(table["note"])).exp()[:, 1].numpy()
    np.testing.assert_allclose(predicted["p_well"], wanted, rtol=1e-5)
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    for refused in (
        lambda: open_model(model, tests),
        lambda: export(folder, tmp_path / "other.pt2"),
        lambda: fedbayes.Result(folder).predictor(),
    ):
        with pytest.raises((ModelError, RunError), match="frozen weights"):
            refused()
    tokenizer = base / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["normalizer"] = None
    tokenizer.write_text(json.dumps(content))
    fedbayes.data.tokens._load.cache_clear()
    with pytest.raises(DataError, match="tokenizer"):
        run.preprocessing.apply(TEXTS)
    fedbayes.data.tokens._load.cache_clear()


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "fedadam", "feddrop", "laplace"])
def test_averaging_methods_train_adapters(method, bert, texts):
    run = fedbayes.run(**settings(bert, texts, rounds=1, method={"name": method}))
    assert run.summary["model_parameters"] > 20_000
    assert run.metrics[0]["bytes_up"] < 40_000


def test_units_of_adapters_are_their_ranks(bert, texts):
    """What FedSparse leaves out of adapters is ranks: both factors lose them."""
    net = network(bert, trains="lora", lora_rank=4)
    found = {g.layer: g for g in net.groups if not g.output}
    assert len(found) == 4
    for layer, group in found.items():
        assert layer.endswith(".lora_A.default")
        assert group.count == 4
        assert [(a.tensor, a.axis) for a in group.readers] == [
            (layer.replace("lora_A", "lora_B") + ".weight", 1)
        ]
    run = fedbayes.run(**settings(bert, texts, rounds=1, method={"name": "fedsparse"}))
    assert run.metrics[0]["cohort"] == 3


def test_with_a_fixed_factor_the_mean_of_adapters_is_that_of_what_they_add(bert, texts):
    config = settings(bert, texts, rounds=1, model={"lora_trains": "b"})
    with Simulation(Config.create(**config)) as simulation:
        net, method, server = simulation.network, simulation.method, simulation.server
        assert not any(".lora_A." in name for name in net.initial)
        message = encode(method.message(server, RoundContext(simulation.run, 1)))
        reports = []
        for client in range(3):
            task = Task(client, 1, message, None, net.constants_digest)
            reports.append(decode(simulation.runtime.train(task).report))
        sizes = torch.tensor(simulation.data.train_sizes(), dtype=torch.float64)
        (step,) = list(simulation)
    for name in net.initial:
        if ".lora_B." in name:
            a = net.constants[name.replace("lora_B", "lora_A")].double()
            added = torch.stack([r[name].double() @ a for r in reports])
            mean = torch.tensordot(sizes / sizes.sum(), added, dims=1)
            torch.testing.assert_close(step.server.weights[name].double() @ a, mean)


def test_pictures_are_seen_as_the_processor_does(vit, tmp_path):
    from PIL import Image
    from transformers import ViTImageProcessor

    rng = torch.Generator().manual_seed(0)
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for number in range(4):
            pixels = torch.randint(0, 256, (20 + number, 24, 3), generator=rng, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / kind / f"{number}.png")
    model = {"name": "transformers", "pretrained": str(vit), "trains": "head"}
    data = {"path": tmp_path, "clients": 1, "partition": "iid", "test": 0.5}
    with Simulation(Config.create(data=data, model=model)) as simulation:
        seen = simulation.data.train(0).x
        rows = simulation.data.partition.train
    files = sorted(tmp_path.rglob("*.png"))
    images = [Image.open(files[row]) for row in rows]
    processor = ViTImageProcessor.from_pretrained(vit)
    wanted = processor(images, return_tensors="pt", device="cpu")["pixel_values"]
    # Fast processors resize tensors, ours Pillow's pictures: half a step of 8 bits at most.
    assert (seen - wanted).abs().max() < 2.1 / 127.5
    assert (seen - wanted).abs().mean() < 0.5 / 127.5


def test_a_frozen_body_keeps_its_statistics():
    if not available("timm"):
        pytest.skip("timm is not installed")
    chosen = ModelSettings(name="timm", pretrained="resnet10t", scratch=True, trains="head")
    net = build(chosen, (3, 32, 32), 4, seed=0)
    assert set(net.initial) == {"fc.weight", "fc.bias"}
    assert not net.buffers
    statistics = {n for n in net.module.state_dict() if n.endswith(("_mean", "_var", "_tracked"))}
    assert statistics
    assert statistics <= net.constants.keys()
    before = net.constants_digest
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(net.initial, x, training=True), net(net.initial, x))
    del net.__dict__["constants_digest"]
    assert net.constants_digest == before
    whole = build(chosen.model_copy(update={"trains": "all"}), (3, 32, 32), 4, seed=0)
    assert statistics <= whole.buffers


def test_the_hub_out_of_reach_is_told_with_the_way_out(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing.*hf download nobody/nothing"):
        network("nobody/nothing")
    with pytest.raises(ModelError, match="folder"):
        network("/nowhere/at/all")


def test_code_that_comes_with_a_network_is_never_run(bert, tmp_path):
    planted = shutil.copytree(bert, tmp_path / "planted")
    mark = tmp_path / "ran"
    content = json.loads((planted / "config.json").read_text())
    content |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (planted / "config.json").write_text(json.dumps(content))
    (planted / "mine.py").write_text(f"open({str(mark)!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ModelError, match="needs its own"):
        network(planted)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"model": {"lora_targets": ["nothing"]}},
            "model.lora_targets to some of query, key, value",
        ),
        ({"model": {"task": "image-classification"}}, "sequence-classification"),
        ({"data": {"max_tokens": 40}}, "Set it to 32 or less"),
        ({"data": {"tokens": "words"}}, "no column 'words'"),
        ({"model": {"name": "mlp", "pretrained": "x"}}, "Set name too"),
        ({"model": {"pretrained": None}}, "needs the name of a network"),
        ({"model": {"batch_norm": "local"}}, "freezes it. Leave"),
        ({"model": {"batch_norm": "frozen"}}, "no batch normalization"),
        ({"model": {"name": "mlp"}}, "tokens"),
        ({"data": {"tokens": None, "drop": ["note"]}}, "data.tokens"),
    ],
)
def test_what_does_not_fit_is_refused(change, reason, bert, texts):
    config = settings(bert, texts)
    for table, values in change.items():
        config[table] = {**config[table], **values}
    for table in ("data", "model"):
        config[table] = {k: v for k, v in config[table].items() if v is not None}
    with pytest.raises(FedbayesError, match=reason):
        fedbayes.run(**config)


def test_a_text_that_is_missing_is_named(bert, tmp_path):
    file = tmp_path / "notes.csv"
    file.write_text("note,outcome\nfine,a\n,b\nbad,a\n")
    config = settings(bert, file)
    config["data"].pop("group")
    with pytest.raises(DataError, match=r"column 'note' has no text in row 2"):
        fedbayes.run(**config)
    with pytest.raises(ConfigError, match="tokens needs a tokenizer"):
        Config.create(data={"path": file, "tokens": "note"})
