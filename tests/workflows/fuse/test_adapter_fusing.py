"""Fusion of LoRA adapters: against PEFT, brute force, and networks that PEFT loads."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedbayes
from fedbayes.core.devices import arithmetic
from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion import low_rank
from fedbayes.fusion.adapted import adapted, second_moments
from fedbayes.fusion.low_rank import LayerChanges, LowRank, least_squares
from fedbayes.fusion.settings import AdapterFunctionSettings, AdapterSettings, AdapterTaskSettings
from fedbayes.inputs import build_prior
from fedbayes.inputs.texts import text_inputs
from fedbayes.models import ModelSettings, read_weights
from fedbayes.models.network import digest_of
from fedbayes.models.others import token_mask
from fedbayes.workflows.fuse.adapter_fusing import _Pace, head_size
from fedbayes.workflows.fuse.client_models import Seen, read_silos
from fedbayes.workflows.serve.model_files import ModelFiles, write_model
from tests.helpers.command_line import command
from tests.helpers.others import (
    WORDS,
    available,
    write_image_network,
    write_text_network,
    write_texts,
)

if not (available("transformers") and available("peft")):
    pytest.skip("the extra hf is not installed", allow_module_level=True)
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
FROZEN_HEAD = "base_model.model.lm_head.base_layer"
QUERY, VALUE = (f"bert.encoder.layer.0.attention.self.{name}" for name in ("query", "value"))


def change(rank, inputs=6, outputs=5, scale=1.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    parts = [torch.randn(rank, inputs, generator=rng), torch.randn(outputs, rank, generator=rng)]
    return LowRank(*parts, scale)


def moment(width=6, seed=0, rows=40):
    rng = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(rows, width, generator=rng, dtype=torch.float64)
    x = x @ torch.randn(width, width, generator=rng, dtype=torch.float64)
    return x.T @ x / rows


def far(whole, changes):
    """Σ_s α_s E‖(M − ΔW_s) x_s‖²."""
    each = zip(changes.alpha, changes.clients, changes.moments, strict=True)
    total = torch.zeros((), dtype=torch.float64)
    for share, own, c in each:
        off = whole - (0 if own is None else own.whole)
        total = total + share * torch.trace(off @ c @ off.T)
    return total


def test_the_closed_form_is_the_best_of_its_rank():
    """No descent from a hundred starts finds a nearer change of the rank."""
    clients = [change(2, seed=1), change(3, scale=0.5, seed=2), None]
    changes = LayerChanges("l", clients, [0.5, 0.3, 0.2], 2, [moment(seed=s) for s in range(3)])
    found = least_squares(changes, AdapterFunctionSettings(ridge=0.0))
    lowest = float(far(found.whole, changes))
    rng = torch.Generator().manual_seed(0)
    starts = [LowRank(found.a + 0.1 * torch.randn(found.a.shape, generator=rng), found.b)]
    starts += [change(2, seed=seed) for seed in range(12)]
    reached = []
    for start in starts:
        a, b = (t.double().clone().requires_grad_() for t in (start.a, start.b))
        descent = torch.optim.LBFGS([a, b], max_iter=500, line_search_fn="strong_wolfe")

        def loss(a=a, b=b, descent=descent):
            descent.zero_grad()
            error = far(b @ a, changes)
            error.backward()
            return error

        descent.step(loss)
        reached.append(float(far((b @ a).detach(), changes)))
    assert min(reached) >= lowest * (1 - 1e-9)
    assert min(reached) == pytest.approx(lowest, rel=1e-4)


def test_full_rank_is_the_normal_equations():
    clients, moments = [change(5, seed=1), change(5, seed=2)], [moment(seed=1), moment(seed=2)]
    changes = LayerChanges("l", clients, [0.25, 0.75], 5, moments)
    wanted = sum(
        a * one.whole @ c for a, one, c in zip([0.25, 0.75], clients, moments, strict=True)
    ) @ torch.linalg.inv(0.25 * moments[0] + 0.75 * moments[1])
    found = least_squares(changes, AdapterFunctionSettings(ridge=0.0))
    torch.testing.assert_close(found.whole, wanted)


@pytest.mark.parametrize("method", ["least_squares", "regmean", "svd", "cat", "average", "linear"])
def test_of_one_adapter_twice_comes_the_same(method):
    own = change(3, scale=2.0)
    rank = 6 if method == "cat" else 3
    changes = LayerChanges("l", [own, own], [0.4, 0.6], rank, [moment(seed=1), moment(seed=2)])
    found = getattr(low_rank, method)(changes, AdapterFunctionSettings())
    weights = (0.4**0.5 + 0.6**0.5) ** 2 if method == "linear" else 1.0
    torch.testing.assert_close(found.whole, weights * own.whole, rtol=1e-5, atol=1e-5)


def test_ranks_that_fit_are_exact():
    clients = [change(2, seed=1), change(1, scale=3.0, seed=2)]
    mean = 0.3 * clients[0].whole + 0.7 * clients[1].whole
    changes = LayerChanges("l", clients, [0.3, 0.7], 3)
    for method in (low_rank.cat, low_rank.svd):
        torch.testing.assert_close(method(changes, AdapterSettings()).whole, mean)
    both = LayerChanges("l", clients, [0.3, 0.7], 3, [moment(seed=4)] * 2)  # of the same inputs
    found = least_squares(both, AdapterFunctionSettings())
    torch.testing.assert_close(found.whole, mean)
    torch.testing.assert_close(found.a.norm(dim=1), found.b.norm(dim=0))


# Adapters of PEFT.


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_text_network(tmp_path_factory.mktemp("bert"))


def model(bert, task="SEQ_CLS", kind="SequenceClassification"):
    import transformers

    if task == "FEATURE_EXTRACTION":
        return transformers.AutoModel.from_pretrained(bert).eval()
    sizes = {"num_labels": 3} if "Classification" in kind else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(bert, **sizes).eval()


def write_adapter(bert, folder, seed, task="SEQ_CLS", kind="SequenceClassification", **settings):
    """An adapter with random factors."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["query", "value"], **settings}
    net = get_peft_model(model(bert, task, kind), LoraConfig(task_type=task, **settings))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=rng))
    net.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(bert, tmp_path_factory):
    """Two that differ in rank, scaling and layers."""
    place = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(bert, place / "north", 1),
        write_adapter(
            bert, place / "south", 2, r=2, use_rslora=True, target_modules=["query", "key"]
        ),
    ]


def loaded(bert, folder, task="SEQ_CLS", **more):
    from peft import PeftModel

    return PeftModel.from_pretrained(model(bert, task, **more), folder).eval()


def delta(net, layer):
    return net.get_submodule(f"base_model.model.{layer}").get_delta_weight("default")


def ids(count=20, length=12, seed=0):
    """Texts of words, with padding behind some."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(5, 5 + len(WORDS), (count, length), generator=rng)
    x[:, 0] = 2
    for row in range(0, count, 3):
        x[row, 4 + row % 5 :] = -1
    return x


def logits(net, x):
    with torch.no_grad():
        return net(input_ids=x.clamp_min(0), attention_mask=(x >= 0).long()).logits


def test_an_adapter_here_answers_as_peft_does(bert, adapters):
    """Scaling, rsLoRA, heads and masks of padding are as in PEFT; the base stays as it was."""
    from fedbayes.models import ModelSettings
    from fedbayes.models.others import build_other
    from fedbayes.workflows.fuse.adapter_files import read_adapters

    settings = ModelSettings(name="transformers", pretrained=str(bert), trains="head")
    base, x = build_other(settings, (12,), 3), ids()
    before = digest_of(dict(base.state_dict()))
    for one, folder in zip(read_adapters(adapters, ModelFiles()), adapters, strict=True):
        net = adapted(base, one.layers, one.saved, one.source)
        with torch.no_grad():
            torch.testing.assert_close(net(x), logits(loaded(bert, folder), x))
        assert {n.rpartition(".")[2] for n, p in net.named_parameters() if p.requires_grad} == {
            *("a", "b", "weight", "bias")
        }
        moments = second_moments(net, list(one.layers), [x], token_mask)
        seen = []
        with torch.no_grad():
            layer = net.network.get_submodule(QUERY)
            layer.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
            net(x)
        rows = torch.cat([row[keep] for row, keep in zip(seen[0], x >= 0, strict=True)]).double()
        torch.testing.assert_close(moments[QUERY], rows.T @ rows / len(rows), rtol=1e-4, atol=1e-4)
        net(x).sum().backward()
        torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1).step()
    assert digest_of(dict(base.state_dict())) == before


class SharedInput(nn.Module):
    """Two layers have one input; a third one has it after a change in place."""

    def __init__(self):
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        x = x.clone()
        x += self.query(x) * self.value(x)
        return self.out(x)


@pytest.mark.parametrize("half", [False, True])
def test_moments_of_layers_with_one_input(half):
    """Their sums are in float32 also where the network computes in bfloat16."""
    net, batches = SharedInput(), list(torch.randn(4, 8, 3))
    wanted = {"query": torch.cat(batches), "value": torch.cat(batches)}
    with torch.no_grad(), arithmetic(half, torch.device("cpu")):
        found = second_moments(net, ["query", "value", "out"], batches, lambda x: None)
        wanted["out"] = torch.cat([x + net.query(x) * net.value(x) for x in batches])
    for name, rows in wanted.items():
        moments = rows.double().T @ rows.double() / len(rows)
        torch.testing.assert_close(found[name], moments, rtol=1e-5, atol=1e-5)


def fuse(adapters, out, *options):
    assert command("fuse", *adapters, "-o", out, *options) == 0
    return out


@pytest.mark.parametrize("kind", ["linear", "cat", "svd", "ties_svd"])
def test_baselines_are_those_of_peft(kind, bert, tmp_path):
    """`add_weighted_adapter`, with equal weights."""
    folders = [
        write_adapter(bert, tmp_path / str(seed), seed, task="FEATURE_EXTRACTION")
        for seed in (1, 2, 3)
    ]
    method, weight = kind.removesuffix("_svd"), 1 / 3
    more = ["--density", "0.3", "--rank", "4"] if method == "ties" else []
    mine = loaded(bert, fuse(folders, tmp_path / "m", "-m", method, *more), "FEATURE_EXTRACTION")
    net = loaded(bert, folders[0], "FEATURE_EXTRACTION")
    names = ["default"]
    for number, folder in enumerate(folders[1:]):
        names.append(net.load_adapter(folder, f"a{number}"))
        names[-1] = f"a{number}"
    # PEFT divides a sum of weighted entries by their number, so weights are 1 there.
    weights = [1.0 if method == "ties" else weight] * 3
    options = {"density": 0.3} if method == "ties" else {}
    net.add_weighted_adapter(names, weights, "theirs", kind, svd_rank=4, **options)
    for layer in (name.removeprefix("bert.") for name in (QUERY, VALUE)):
        theirs = net.get_submodule(f"base_model.model.{layer}").get_delta_weight("theirs")
        torch.testing.assert_close(delta(mine, layer), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["average", "linear"])
def test_layers_of_several_ranks_are_loaded_by_peft(method, bert, tmp_path):
    """Factors by hand; both have the scale 8 / 2, and shares of a half."""
    ranks = {"rank_pattern": {"query": 2}}
    folders = [write_adapter(bert, tmp_path / str(seed), seed, **ranks) for seed in (1, 2)]
    mine = loaded(bert, fuse(folders, tmp_path / "m", "-m", method))
    parts = [read_weights(folder / "adapter_model.safetensors") for folder in folders]
    a, b = (
        sum(one[f"base_model.model.{QUERY}.lora_{k}.weight"] for one in parts) / 2 for k in "AB"
    )
    weight = 4 if method == "average" else 4 * 2  # √½ of each factor, not ½
    torch.testing.assert_close(delta(mine, QUERY), weight * b @ a, rtol=1e-4, atol=1e-5)


def test_adapters_that_differ_are_fused(bert, adapters, tmp_path, capsys):
    """Ranks, scalings and layers; a layer that one leaves alone has half of the other's change."""
    out = fuse(adapters, tmp_path / "svd", "-m", "svd", "--rank", "6")
    mine, each = loaded(bert, out), [loaded(bert, folder) for folder in adapters]
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 6
    torch.testing.assert_close(delta(mine, VALUE), delta(each[0], VALUE) / 2)
    both = (delta(each[0], QUERY) + delta(each[1], QUERY)) / 2
    torch.testing.assert_close(delta(mine, QUERY), both, rtol=1e-4, atol=1e-5)
    head = [read_weights(f / "adapter_model.safetensors") for f in (*adapters, out)]
    name = "base_model.model.classifier.weight"
    torch.testing.assert_close(head[2][name], (head[0][name] + head[1][name]) / 2)
    capsys.readouterr()
    assert command("fuse", *adapters, "-o", tmp_path / "lin", "-m", "linear") == 2
    assert "key have the ranks none, 2" in " ".join(capsys.readouterr().err.split())


def test_function_writes_what_it_scored(bert, adapters, tmp_path, capsys):
    """On real texts of a file: PEFT loads the network that is as near to the teacher as told."""
    texts = tmp_path / "texts.txt"
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(len(WORDS), (60, 8), generator=rng).tolist()
    texts.write_text("\n".join(" ".join(WORDS[k] for k in row) for row in rows))
    options = ["--inputs", texts, "--draws", "64", "--rank", "2", "--minutes", "0", "--json"]
    assert command("fuse", *adapters, "-o", tmp_path / "out", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rank"] == 2
    mine = loaded(bert, tmp_path / "out")
    each = [loaded(bert, folder) for folder in adapters]
    from transformers import AutoTokenizer

    # One in five is held out.
    held_out = np.random.default_rng(0).permutation(60)[:12]
    lines = [texts.read_text().splitlines()[row] for row in held_out]
    batch = AutoTokenizer.from_pretrained(bert)(lines, return_tensors="pt", padding=True)
    x = torch.where(batch["attention_mask"] > 0, batch["input_ids"], -1)
    pooled = sum(logits(net, x).softmax(1) for net in each) / 2
    gap = (pooled * (pooled.log() - logits(mine, x).log_softmax(1))).sum(1).mean()
    # Drawn with repetition there.
    assert found["divergence"]["fused, least squares"] == pytest.approx(float(gap), rel=0.2)


def test_a_twin_changes_nothing(bert, adapters, tmp_path):
    """With its head too: the fused network is the network of both."""
    twin = shutil.copytree(adapters[0], tmp_path / "twin")
    options = ["--draws", "128", "--length", "12", "--minutes", "0"]
    out = fuse([adapters[0], twin], tmp_path / "out", *options)
    x = ids()
    wanted = logits(loaded(bert, adapters[0]), x).log_softmax(1)
    torch.testing.assert_close(logits(loaded(bert, out), x).log_softmax(1), wanted, **CLOSE)


@pytest.mark.parametrize(
    ("table", "share"), [("[[90, 5, 5], [5, 5, 90]]", 0.2), ("[[90, 0, 0], [0, 0, 90]]", 0.4)]
)
def test_the_last_layer_learns_what_counts_say(table, share, bert, adapters, tmp_path, capsys):
    """Class counts are part of the teacher, and so of the head; also if no client has two."""
    counts = tmp_path / "counts.json"
    counts.write_text(table)
    options = ["--draws", "256", "--length", "12", "--minutes", "0", "--json"]
    capsys.readouterr()
    assert command("fuse", *adapters, "-o", tmp_path / "o", "--counts", counts, *options) == 0
    far = json.loads(capsys.readouterr().out)["divergence"]
    assert far["fused, least squares"] < share * min(far[one.name] for one in adapters)


def test_networks_of_images(tmp_path):
    """From dead leaves, scaled by the network's processor."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForImageClassification

    vit = write_image_network(tmp_path / "vit")
    found = []
    for seed in (1, 2):
        net = AutoModelForImageClassification.from_pretrained(vit)
        settings = LoraConfig(
            r=2, target_modules=["q_proj", "v_proj", "query", "value"],
            modules_to_save=["classifier"],
        )  # fmt: skip
        net = get_peft_model(net, settings)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=rng))
        net.save_pretrained(tmp_path / str(seed))
        found.append(tmp_path / str(seed))
    out = fuse(found, tmp_path / "out", "--draws", "64", "--minutes", "0", "--rank", "3")
    mine, *each = (
        PeftModel.from_pretrained(AutoModelForImageClassification.from_pretrained(vit), f).eval()
        for f in (out, *found)
    )
    leaves = build_prior("leaves", (3, 16, 16))
    x = (leaves.draw(64, np.random.default_rng(1)) - 0.5) / 0.5  # as the processor has it
    with torch.no_grad():
        said = [net(pixel_values=x).logits for net in (mine, *each)]
    pooled = (said[1].softmax(1) + said[2].softmax(1)) / 2
    gaps = [float((pooled * (pooled.log() - f.log_softmax(1))).sum(1).mean()) for f in said]
    assert gaps[0] < 0.5 * min(gaps[1:])


def test_what_would_take_hours_is_told():
    pace = _Pace("least squares", lambda text: None, 10**9)
    pace.begin -= 1
    with pytest.raises(ConfigError, match=r"would take \d+.\d hours.*--draws 128.*--method svd"):
        pace.step(1)


@pytest.mark.slow
def test_end_to_end_only_brings_it_nearer(bert, adapters, tmp_path, capsys):
    scores = []
    for minutes in ("0", "0.1"):
        out = tmp_path / minutes.replace(".", "-")
        options = ["--draws", "64", "--length", "12", "--minutes", minutes, "--json"]
        if minutes != "0":
            options += ["--set", "function.distillation.precision=float32"]
        assert command("fuse", *adapters, "-o", out, *options) == 0
        scores.append(json.loads(capsys.readouterr().out)["divergence"])
    assert scores[1].get("fused", 0) <= scores[1]["fused, least squares"]
    assert scores[0]["fused, least squares"] == pytest.approx(scores[1]["fused, least squares"])
    mine, x = loaded(bert, tmp_path / "0-1"), ids()
    assert torch.isfinite(logits(mine, x)).all()


def test_clients_of_a_federation(bert, tmp_path, capsys):
    """From a federation with adapters to a file of its form, which `evaluate` reads, and PEFT."""
    texts = write_texts(tmp_path / "notes.csv")
    shape = {"name": "transformers", "pretrained": str(bert), "trains": "lora", "lora_rank": 2}
    data = {"path": texts, "label": "outcome", "group": "site", "tokens": "note", "max_tokens": 12}
    data |= {"validation": 0.2}
    run = tmp_path / "run"
    training = {"lr": 0.1, "epochs": 5}
    fedbayes.run(method="local", rounds=2, data=data, model=shape, training=training, out=run)
    clients = sorted((run / "clients").glob("*.safetensors"))
    options = ["--inputs", texts, "--draws", "64", "--minutes", "0", "--json", "--rank", "3"]
    file, folder = tmp_path / "fused.safetensors", tmp_path / "fused"
    for out in (file, folder):
        capsys.readouterr()
        assert command("fuse", *clients, "-o", out, *options) == 0
        told = json.loads(capsys.readouterr().out)
    assert told["bytes"] < 20_000
    assert ModelFiles()[file][1].temperature == told["temperature"] != 1
    # Counts and temperatures in the files are those of the teacher, as of whole networks.
    asked = {"inputs": str(texts), "draws": 64, "minutes": 0, "rank": 3}
    notes = fedbayes.fuse(clients, out=tmp_path / "python", **asked).notes
    assert notes[0] == "counts of samples are those in the files"
    assert "by counts of classes of the models at temperatures of" in notes[-1]
    counts = tmp_path / "counts.json"
    files = ModelFiles()
    tables = [files[one][1].counts for one in clients]
    counts.write_text(json.dumps(tables))
    assert command("fuse", *clients, "-o", tmp_path / "same", *options, "--counts", counts) == 0
    assert json.loads(capsys.readouterr().out)["divergence"] == told["divergence"]
    counts.write_text("[[40], [30], [30]]")
    assert command("fuse", *clients, "-o", tmp_path / "same", *options, "--counts", counts) == 0
    assert json.loads(capsys.readouterr().out)["divergence"] != told["divergence"]
    names = read_weights(file)
    assert all(".lora_" in name or "classifier" in name for name in names)
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=2)
    theirs = PeftModel.from_pretrained(base, folder).eval()
    x = ids()
    ours = read_silos([file], None, Seen())
    with torch.no_grad():
        torch.testing.assert_close(ours.networks[str(file)](x), logits(theirs, x))
    capsys.readouterr()
    assert command("evaluate", file, "--run", run, "--json") == 0


def test_a_fused_adapter_is_as_sure_as_its_clients(bert, tmp_path, capsys):
    """Two clients of one prediction and one temperature: it is that of the fused adapter."""
    texts = write_texts(tmp_path / "notes.csv")
    data = {"path": texts, "label": "outcome", "tokens": "note", "max_tokens": 12, "group": "site"}
    model = {"name": "transformers", "pretrained": str(bert), "trains": "lora", "lora_rank": 2}
    training = {"lr": 0.1, "epochs": 5}
    run = tmp_path / "run"
    fedbayes.run(method="local", rounds=1, data=data, model=model, training=training, out=run)
    first = next((run / "clients").glob("*.safetensors"))
    weights, card = ModelFiles()[first]
    one, twin = tmp_path / "one.safetensors", tmp_path / "twin.safetensors"
    write_model(one, weights, replace(card, temperature=3.0))
    write_model(twin, weights, replace(card, temperature=3.0, client="twin"))
    fused, folder = tmp_path / "fused.safetensors", tmp_path / "fused"
    found = fedbayes.fuse([one, twin], out=fused, inputs=str(texts), draws=64, minutes=0)
    warmth = found.summary["temperature"]
    assert ModelFiles()[fused][1].temperature == warmth
    networks = read_silos([one, fused], None, Seen()).networks
    with torch.no_grad():
        said = [network(ids()).log_softmax(-1) for network in networks.values()]
    np.testing.assert_allclose((said[1] / warmth).softmax(-1), (said[0] / 3).softmax(-1), atol=0.02)
    capsys.readouterr()
    quick = ("--inputs", texts, "--draws", "64", "--minutes", "0")
    assert command("fuse", one, twin, "-o", folder, *quick) == 0
    assert f"divide the logits of {folder} by" in capsys.readouterr().out.replace("\n", " ")
    # Clients' sums take the place of this temperature in a file, but a folder has none.
    sums, better = tmp_path / "sums.json", tmp_path / "better.safetensors"
    own = ["--data", texts, "-o", sums, "--temperature"]
    assert command("sums", fused, *own) == 0
    assert command("calibrate", fused, "--sums", sums, "-o", better) == 0
    assert ModelFiles()[better][1].temperature != warmth
    for wrong in (["sums", folder, *own], ["calibrate", folder, "--sums", sums, "-o", "none.pt"]):
        assert command(*wrong) == 2
        assert "has no place for a temperature" in capsys.readouterr().err


def refused(capsys, *arguments):
    capsys.readouterr()
    assert command("fuse", *arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_fused_is_told_by_name(bert, adapters, tmp_path, capsys):
    north, south = adapters
    out = ("-o", tmp_path / "out")
    dora = write_adapter(bert, tmp_path / "dora", 3, use_dora=True)
    assert f"{dora.name} is DoRA" in refused(capsys, north, dora, *out)
    other = write_text_network(tmp_path / "other")
    elsewhere = write_adapter(other, tmp_path / "elsewhere", 3)
    assert "another base network" in refused(capsys, north, elsewhere, *out, "-m", "svd")
    (tmp_path / "empty").mkdir()
    assert "has no adapter_config.json" in refused(capsys, north, tmp_path / "empty", *out)
    half = shutil.copytree(north, tmp_path / "half")
    (half / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(capsys, north, half, *out)
    assert "rank" in refused(capsys, north, south, *out, "--rank", "0")
    assert "no effect. Give 6 or less" in refused(capsys, north, south, *out, "--rank", "7")
    assert "--rank has no effect on cat" in refused(
        capsys, north, south, *out, "-m", "cat", "--rank", "4"
    )
    assert "match fuses whole networks" in refused(capsys, north, south, *out, "-m", "match")
    assert "--width has no effect on LoRA adapters" in refused(
        capsys, north, south, *out, "--width", "2"
    )
    assert "to a folder" in refused(capsys, north, south, "-o", tmp_path / "x.safetensors")
    assert "would replace one of the inputs" in refused(capsys, north, south, "-o", south)
    headless = write_adapter(bert, tmp_path / "headless", 4, task=None)
    assert "modules_to_save" in refused(capsys, north, headless, *out, "-m", "svd")
    biased = write_adapter(bert, tmp_path / "biased", 5, bias="lora_only")
    assert "trained biases" in refused(capsys, north, biased, *out)
    assert not (tmp_path / "out").exists()


def test_adapters_for_other_tasks_are_told(bert, adapters, tmp_path, capsys):
    """Their networks are not those that inputs go through, whatever shapes they have."""
    north, _ = adapters
    out = ("-o", tmp_path / "out")
    tokens = [
        write_adapter(bert, tmp_path / str(seed), seed, "TOKEN_CLS", kind="TokenClassification")
        for seed in (1, 2)
    ]
    assert "is for TOKEN_CLS (task_type)" in refused(capsys, *tokens, *out)
    assert "Fuse adapters for one task" in refused(capsys, north, tokens[0], *out, "-m", "svd")
    plain = [write_adapter(bert, tmp_path / f"plain{k}", k, None) for k in (1, 2)]
    assert "classifier.bias is neither in the files" in refused(capsys, *plain, *out)
    headless = write_adapter(bert, tmp_path / "headless", 4, "FEATURE_EXTRACTION")
    assert "two classes of one network" in refused(capsys, headless, plain[0], *out, "-m", "svd")
    assert not (tmp_path / "out").exists()


def test_a_base_network_that_has_moved(bert, adapters, tmp_path, monkeypatch, capsys):
    """Names of one folder are one; other names need --base."""
    monkeypatch.chdir(bert.parent)
    near = write_adapter(bert.name, tmp_path / "near", 3)
    fuse([adapters[0], near], tmp_path / "m", "-m", "svd")
    moved = write_adapter(shutil.copytree(bert, tmp_path / "moved"), tmp_path / "far", 3)
    both = (adapters[0], moved)
    assert "write one base_model" in refused(capsys, *both, "-o", tmp_path / "n", "-m", "svd")
    options = ["--base", bert, "--draws", "64", "--length", "12"]
    same = fuse([adapters[0], near], tmp_path / "same", *options)
    found = fuse(both, tmp_path / "found", *options)
    one, two = (read_weights(f / "adapter_model.safetensors") for f in (same, found))
    torch.testing.assert_close(one, two)
    config = json.loads((found / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(bert), "of which it was measured"


def test_damaged_configs_and_copies_are_told(bert, adapters, tmp_path, capsys):
    north, out = adapters[0], ("-o", tmp_path / "out", "-m", "svd")
    for number, bad in enumerate(({"alpha_pattern": {"(": 3}}, {"rank_pattern": "abc"})):
        folder = shutil.copytree(north, tmp_path / str(number))
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | bad))
        assert f"cannot read {folder}" in refused(capsys, north, folder, *out)
    twice = north / ".." / north.name
    assert "is given twice" in refused(capsys, north, twice, *out)
    assert not (tmp_path / "out").exists()
    copied = shutil.copytree(north, tmp_path / "copied")
    assert command("fuse", north, copied, *out) == 0
    assert "so its client counts twice" in " ".join(capsys.readouterr().err.split())


def test_options_without_effect_are_told(bert, adapters, tmp_path, capsys):
    out = ("-o", tmp_path / "out")
    sums = tmp_path / "sums.json"
    sums.write_text("{}")
    assert "--sums has no effect on PEFT" in refused(capsys, *adapters, *out, "--sums", sums)
    assert "at most 32 tokens" in refused(capsys, *adapters, *out, "--length", "33")
    assert "a larger --ridge" in refused(capsys, *adapters, *out, "--ridge", "0", "--draws", "64")
    counts = tmp_path / "counts.json"
    counts.write_text("[[1, 2], [3, 4]]")
    told = refused(capsys, *adapters, *out, "--counts", counts)
    assert "counts of 2 classes, but the adapters predict 3" in told
    assert told == refused(capsys, *adapters, *out, "--counts", counts, "-m", "svd")
    assert "--seed has no effect on dare" in refused(
        capsys, *adapters, *out, "-m", "dare", "--seed", "1"
    )


def test_a_head_that_is_tied_to_embeddings(bert, tmp_path, capsys):
    """PEFT trains a copy of it, and so the networks here have one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    words = AutoTokenizer.from_pretrained(bert)
    base, length = tmp_path / "gpt2", 12
    words.save_pretrained(base)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": length}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=len(words), bos_token_id=2, eos_token_id=3, **sizes)
        GPT2LMHeadModel(config).save_pretrained(base)
    more = {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "kind": "CausalLM"}
    found = [write_adapter(base, tmp_path / str(k), k, "CAUSAL_LM", **more) for k in (1, 2)]
    capsys.readouterr()
    options = ["--draws", "1024", "--json"]
    assert command("fuse", *found, "-o", tmp_path / "out", *options) == 0
    told = json.loads(capsys.readouterr().out)["divergence"]
    assert list(told)[:2] == ["1", "2"]  # folders by their short names
    told = list(told.values())
    for way in (["--minutes", "1"], ["--set", "function.distillation.lr=0.1"]):
        said = refused(capsys, *found, "-o", tmp_path / "no", *way)
        assert "no effect on a language model" in said
    nets = [loaded(base, f, "CAUSAL_LM", kind="CausalLM") for f in (*found, tmp_path / "out")]
    assert isinstance(nets[0].base_model.model, AutoModelForCausalLM._model_mapping[GPT2Config])
    x = text_inputs("texts", str(base), length).draw(1000, np.random.default_rng(0)).long()
    said = [logits(net, x)[x >= 0] for net in nets]
    pooled = (said[0].softmax(-1) + said[1].softmax(-1)) / 2
    gaps = [float((pooled * (pooled.log() - f.log_softmax(-1))).sum(-1).mean()) for f in said]
    assert told == pytest.approx(gaps, rel=0.05)  # other texts
    # Its change is of low rank, and PEFT saves the frozen weights too.
    more |= {"target_modules": ["c_attn", "lm_head"], "modules_to_save": None}
    found = [write_adapter(base, tmp_path / f"low{k}", k, "CAUSAL_LM", **more) for k in (1, 2)]
    for number, method in enumerate(("function", "svd")):
        merged = fuse(found, tmp_path / method, "-m", method, "--rank", "8")
        nets = [loaded(base, f, "CAUSAL_LM", kind="CausalLM") for f in (*found, merged)]
        mean = (delta(nets[0], "lm_head") + delta(nets[1], "lm_head")) / 2
        if number:
            torch.testing.assert_close(delta(nets[2], "lm_head"), mean, rtol=1e-4, atol=1e-5)
        assert torch.equal(*(net.get_submodule(FROZEN_HEAD).weight for net in nets[::2]))
    for folder in found:  # trained in another precision than the base network is stored in
        weights = read_weights(folder / "adapter_model.safetensors")
        halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
        save_file(halves, folder / "adapter_model.safetensors")
    fuse(found, tmp_path / "half", "--draws", "64")
    weights = read_weights(found[1] / "adapter_model.safetensors")
    (name,) = (name for name in weights if ".base_layer." in name)
    save_file(weights | {name: 2 * weights[name]}, found[1] / "adapter_model.safetensors")
    assert "different frozen weights" in refused(capsys, *found, "-o", tmp_path / "no")


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"classifier": 3, "pre_classifier": 32}, 3),
        ({"classifier.dense": 32, "classifier.out_proj": 3}, 3),
        ({"classification_head.dense": 32, "classification_head.out_proj": 3}, 3),
        ({"score": 40, "extra": 4}, 40),
        ({"pooler.dense": 32}, 0),
        ({}, 0),
    ],
)
def test_a_head_tells_the_classes_under_any_name(sizes, wanted):
    saved = {f"{name}.weight": torch.zeros(size, 32) for name, size in sizes.items()}
    saved |= {f"{name}.bias": torch.zeros(size) for name, size in sizes.items()}
    assert head_size(saved) == wanted


def test_methods_of_adapters_name_them_for_other_files(tmp_path, capsys):
    for name in ("a", "b"):
        torch.save(nn.Linear(3, 2).state_dict(), tmp_path / f"{name}.pt")
    files = (tmp_path / "a.pt", tmp_path / "b.pt", "-o", tmp_path / "c.pt")
    assert "svd fuses LoRA adapters" in refused(capsys, *files, "-m", "svd")
    assert "only with LoRA adapters. Leave it out" in refused(capsys, *files, "--rank", "3")


def test_settings_have_bounds():
    with pytest.raises(ValueError, match="rank"):
        AdapterTaskSettings(rank=0)
    ranks = LayerChanges("query", [change(2), change(3)], [0.5, 0.5], 3)
    with pytest.raises(ModelError, match="ranks 2, 3"):
        low_rank.average(ranks, None)
    scales = LayerChanges("query", [change(2), change(2, scale=2.0)], [0.5, 0.5], 2)
    with pytest.raises(ModelError, match="scaled by 1, 2"):
        low_rank.average(scales, None)


def test_whole_networks_as_transformers_saves_them(bert, tmp_path, capsys):
    """Files of `state_dict` have no names of ours, and are of texts, not of rows of numbers."""
    from transformers import AutoModelForSequenceClassification

    def plain():
        return AutoModelForSequenceClassification.from_pretrained(bert, num_labels=2)

    for name, seed in (("a.pt", 1), ("b.pt", 2)):
        network = plain()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        torch.save(network.state_dict(), tmp_path / name)
    paths, out = [tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "f.pt"
    settings = {"name": "transformers", "pretrained": str(bert)}
    shared = {"shape": (12,), "classes": 2, "model": ModelSettings(**settings)}
    found = fedbayes.fuse(paths, out=out, minutes=0, draws=64, units="chosen", **shared)
    assert any("no language model to sample texts" in note for note in found.notes)
    plain().load_state_dict(torch.load(out))  # under the same names
    named = ["--shape", "12", "--classes", "2", "--model", "transformers"]
    named += ["--set", f"model.pretrained={bert}", "--set", "function.units=chosen"]
    program = tmp_path / "f.pt2"
    assert command("fuse", *paths, "-o", program, *named, "--minutes", "0", "--draws", "64") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "takes ids of tokens [n, length], -1 after the end of a text; shape (n, 12)" in told
    with pytest.raises(ConfigError, match="needs the name of a network"):
        fedbayes.fuse(paths, out=out, **{**shared, "model": "transformers"})
    with pytest.raises(ModelError, match="no effect on texts"):
        fedbayes.fuse(paths, out=out, minutes=0, mean=0.5, std=0.5, **shared)
    texts = write_texts(tmp_path / "notes.csv")
    columns = [f"data.path={texts}", "data.label=outcome", "data.tokens=note"]
    columns += [f"data.processor={bert}", "data.max_tokens=12", f"model.pretrained={bert}"]
    given = [part for entry in columns for part in ("--set", entry)]
    capsys.readouterr()
    given += ["--model", "transformers", "--json"]
    assert command("evaluate", out, *given) == 0
    told = json.loads(capsys.readouterr().out)
    assert str(out) in json.dumps(told)
    assert command("evaluate", *paths, *given) == 0
