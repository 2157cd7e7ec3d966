"""What is told of a fusion in function space: agreement with clients, and the page."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedbayes.core.targets import Target
from fedbayes.data import Preprocessing
from fedbayes.fusion.function import HeldOut, teacher_of
from fedbayes.inputs import Inputs, build_prior
from fedbayes.likelihoods import build_likelihood
from fedbayes.models import MLP
from fedbayes.storage.card import Card
from fedbayes.workflows.serve.model_files import write_model
from tests.helpers.command_line import command

INPUTS = Inputs(build_prior("gaussian", (6,)), torch.tensor(0.0), torch.tensor(1.0), seed=3)
AT_ONCE = ("--minutes", "0", "--method", "function")


def network(seed, outputs=3):
    torch.manual_seed(seed)
    return MLP(6, [7], outputs).eval()


def held_out(outputs, likelihood=None):
    clients = {f"c{seed}": network(seed, outputs) for seed in range(2)}
    return HeldOut(teacher_of(clients, None, likelihood)[0], INPUTS)


def test_agreement_by_class_is_counted_draw_by_draw():
    held = held_out(3)
    given = held.outputs(network(5))
    found = held.agreement(given)
    own = [outputs.argmax(-1).tolist() for outputs in (*held.clients, held.taught)]
    said = given.argmax(-1).tolist()
    for row, called in enumerate(own):
        for label in range(3):
            draws = [place for place, k in enumerate(called) if k == label]
            assert found.draws[row, label] == len(draws)
            same = sum(said[place] == label for place in draws)
            share = same / len(draws) if draws else float("nan")
            assert float(found.by_class[row, label]) == pytest.approx(share, nan_ok=True)
    p, q = held.clients[1].softmax(-1), given.softmax(-1)
    wanted = float((p * (p / q).log()).sum(-1).mean())
    assert float(found.divergence[1]) == pytest.approx(wanted, rel=1e-4)
    assert not found.correlation.numel()
    everything = held.agreement(held.taught)
    assert torch.equal(everything.by_class[-1].nan_to_num(1.0), torch.ones(3))


def test_of_two_classes_by_one_logit_the_sign_is_the_class():
    two = build_likelihood("bernoulli", Target("class", ("no", "yes")))
    held = held_out(1, two)
    given = held.outputs(network(5, 1))
    same = (given > 0) == (held.taught > 0)
    assert held.likeness(given).agreement == pytest.approx(float(same.float().mean()))
    found = held.agreement(given)
    for label in (False, True):
        rows = (held.clients[0] > 0) == label
        share = float(((given > 0) == label)[rows].float().mean())
        assert float(found.by_class[0, int(label)]) == pytest.approx(share)


def test_without_classes_predictive_means_are_correlated():
    target = Target("real", ("a", "b"), (3.0, -1.0), (2.0, 5.0))
    kind = build_likelihood("gaussian", target, noise=0.5)
    held = held_out(2, kind)
    given = held.outputs(network(5, 2))
    found = held.agreement(given)
    for row, outputs in enumerate((*held.clients, held.taught)):
        for column in range(2):
            wanted = np.corrcoef(outputs[:, column], given[:, column])[0, 1]
            assert float(found.correlation[row, column]) == pytest.approx(wanted, abs=1e-4)
    assert not found.by_class.numel()
    constant = held.agreement(torch.ones_like(given))
    assert constant.correlation.isnan().all()


class Page(HTMLParser):
    """The elements of a page, their attributes, and the text of each kind."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._at = [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._at = tag

    def handle_data(self, data):
        self.texts.setdefault(self._at, []).append(data.strip())


ODD = "a$b^$<img src=x onerror=alert(1)>"
"""A name that is neither mathematics nor an element."""


@pytest.fixture
def silos(tmp_path):
    """Two files whose cards say what they are of; a name of a file and a class are odd."""
    ones = (1.0,) * 6
    target = Target("class", ("<b>x</b>", "b", "c"))
    seen = Preprocessing((6,), 1.0, (0.0,) * 6, ones, target)
    card = Card(seen, {"name": "mlp", "hidden": [7]}, {}, {}, 1)
    paths = [tmp_path / f"{ODD}.safetensors", tmp_path / "two.safetensors"]
    for seed, path in enumerate(paths):
        write_model(path, network(seed).state_dict(), card)
    return paths


def test_a_page_says_what_the_numbers_say_and_asks_for_nothing(silos, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "test.npz", x=rng.normal(size=(40, 6)), y=rng.integers(3, size=40))
    options = (*AT_ONCE, "--test", tmp_path / "test.npz", "--frontier", "1,2")
    reports = tmp_path / "r.json", tmp_path / "r.html"
    for report in reports:
        out = tmp_path / "g.safetensors"
        assert command("fuse", *silos, "-o", out, *options, "--report", report) == 0
    told, text = json.loads(reports[0].read_text()), reports[1].read_text()
    page = Page(text)
    within = json.loads(page.texts["script"][0])
    marks = {mark["name"]: mark for mark in told["frontier"]}
    heads = [text for text in page.texts["strong"] if text]
    assert heads[0] == f"{100 * told['agreement']:.1f} %", "agreement leads"
    assert heads[1] == f"{marks['fused, width 1']['accuracy']:.3f}", "then accuracy"
    for content in (told, within):
        del content["seconds"], content["seconds_in_all"]
    assert within == told
    cells = page.texts["td"]
    assert f"{told['parameters']:,}" in cells
    for row in told["with_each_client"]:
        for share in row["fused"]["by_class"]:
            assert ("–" if share is None else f"{share:.2f}") in cells
    assert sum("cell" in of.get("class", "") for _, of in page.elements) == 3 * (3 + 2)
    assert told["models"][0]["multiplications"] == 6 * 7 + 7 * 3
    weights = load_file(out)
    assert told["network"]["layers"] == {
        name: list(tensor.shape) for name, tensor in weights.items() if tensor.ndim > 1
    }
    sources = [of["src"] for tag, of in page.elements if tag == "img"]
    assert [source.partition(";")[0] for source in sources] == ["data:image/png"]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http%3A//www", "")
    assert not any(of.get("src", "data:").partition(":")[0] != "data" for _, of in page.elements)


def test_names_in_files_are_only_shown(silos, tmp_path):
    report = tmp_path / "r.html"
    assert command("fuse", *silos, "-o", tmp_path / "g.pt", *AT_ONCE, "--report", report) == 0
    page = Page(report.read_text())
    assert not any("onerror" in of for _, of in page.elements)
    assert ODD in page.texts["td"]
    assert "<b>x</b>" in page.texts["th"]
    kinds = [of.get("type") for tag, of in page.elements if tag == "script"]
    assert kinds == ["application/json", "application/json", None]


def test_targets_that_are_numbers_have_correlations(tmp_path):
    target = Target("real", ("height", "weight"), (3.0, -1.0), (2.0, 5.0))
    seen = Preprocessing((6,), 1.0, (0.0,) * 6, (1.0,) * 6, target)
    task = {"likelihood": "gaussian", "noise": 0.5}
    card = Card(seen, {"name": "mlp", "hidden": [7]}, {}, {}, 1, task=task)
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for seed, path in enumerate(paths):
        write_model(path, network(seed, 2).state_dict(), card)
    for suffix in ("json", "html"):
        options = (*AT_ONCE, "--report", tmp_path / f"r.{suffix}")
        assert command("fuse", *paths, "-o", tmp_path / "g.pt", *options) == 0
    told = json.loads((tmp_path / "r.json").read_text())
    page = Page((tmp_path / "r.html").read_text())
    assert "fused: weight" in page.texts["th"]
    first = told["with_each_client"][0]["fused"]
    assert len(first["correlation"]) == 2
    assert f"{first['correlation'][1]:.3f}" in page.texts["td"]
    assert told["sent"] == ["their weights"]


def test_a_report_of_no_known_format_is_refused(silos, tmp_path, capsys):
    before = set(tmp_path.iterdir())
    options = (*AT_ONCE, "--report", tmp_path / "r.docx")
    assert command("fuse", *silos, "-o", tmp_path / "g.pt", *options) == 2
    assert "name that ends in .json, .html or .htm" in " ".join(capsys.readouterr().err.split())
    assert set(tmp_path.iterdir()) == before
