"""Training and deciding where classes are rare: class weights, focal loss, thresholds."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import fedbayes
from fedbayes import FederatedClassifier
from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.imbalance import reweighted
from fedbayes.workflows.serve.decision import youden
from tests.helpers.command_line import command

THREE = Target("class", ("a", "b", "c"))


def test_weighted_losses_are_those_of_pytorch_and_of_the_paper():
    torch.manual_seed(0)
    f, y = torch.randn(20, 3), torch.tensor([0] * 15 + [1] * 4 + [2])
    plain = build_likelihood("auto", THREE)
    given = reweighted(plain, (1.0, 2.0, 5.0), 0.0, y).nll(f, y)
    each = torch.nn.functional.cross_entropy(f, y, torch.tensor([1.0, 2.0, 5.0]), reduction="none")
    torch.testing.assert_close(given, each.mean())
    # Balanced: every class has the same share of the loss, and all samples together weigh n.
    weights = torch.tensor([20 / (3 * n) for n in (15, 4, 1)])
    balanced = reweighted(plain, "balanced", 0.0, y).nll(f, y)
    torch.testing.assert_close(
        balanced, torch.nn.functional.cross_entropy(f, y, weights), atol=1e-6, rtol=1e-6
    )
    p = f.softmax(1).gather(1, y[:, None])[:, 0]
    focal = reweighted(plain, "none", 2.0, y)
    torch.testing.assert_close(focal.nll(f, y), (-((1 - p) ** 2) * p.log()).mean())
    # Scores are those of all samples as they are, and the run's own likelihood is untouched.
    torch.testing.assert_close(focal.log_prob(f, y), plain.log_prob(f, y))
    torch.testing.assert_close(plain.nll(f, y), torch.nn.functional.cross_entropy(f, y))
    assert reweighted(plain, "none", 0.0, y) is plain


def test_one_logit_is_weighted_likewise():
    two = Target("class", ("no", "yes"))
    torch.manual_seed(0)
    f, y = torch.randn(9, 1), torch.tensor([0] * 7 + [1] * 2)
    both = torch.cat([torch.zeros(9, 1), f], 1)
    for weights, focal in (("balanced", 0.0), ((1.0, 4.0), 1.5)):
        one = reweighted(build_likelihood("bernoulli", two), weights, focal, y).nll(f, y)
        other = reweighted(build_likelihood("categorical", two), weights, focal, y).nll(both, y)
        torch.testing.assert_close(one, other)


def test_a_class_that_a_client_lacks_has_no_share():
    y = torch.tensor([0, 0, 0, 2])
    f = torch.zeros(4, 3, requires_grad=True)
    loss = reweighted(build_likelihood("auto", THREE), "balanced", 0.0, y).nll(f, y)
    torch.testing.assert_close(loss, torch.tensor(3.0).log())
    loss.backward()
    assert torch.isfinite(f.grad).all()


def test_gradients_are_finite_where_a_sample_is_certain():
    f = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    y = torch.tensor([0])
    reweighted(build_likelihood("auto", THREE), "none", 0.5, y).nll(f, y).backward()
    assert torch.isfinite(f.grad).all()


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """A table of two hospitals with one positive of twenty."""
    folder = tmp_path_factory.mktemp("rare")
    rng = np.random.default_rng(0)
    died = rng.random(1200) < 0.05
    x = rng.normal(size=(1200, 2)) + 1.5 * died[:, None]
    frame = pd.DataFrame(x, columns=["a", "b"])
    frame["died"] = np.where(died, "yes", "no")
    frame["site"] = rng.choice(["north", "south"], 1200)
    frame.to_csv(folder / "t.csv", index=False)
    frame.drop(columns=["died", "site"]).to_csv(folder / "new.csv", index=False)
    return folder


def run(folder, name, **training):
    return fedbayes.run(
        rounds=6,
        model={"name": "mlp", "hidden": []},
        data={"path": folder / "t.csv", "label": "died", "group": "site"},
        training=training,
        folder=folder / name,
    )


@pytest.fixture(scope="module")
def plain(rare):
    return run(rare, "plain")


def test_balanced_weights_find_the_rare_class(rare, plain):
    weighted = run(rare, "weighted", class_weights="balanced")
    listed = run(rare, "listed", class_weights=(1.0, 19.0))
    base = plain.summary["metrics"]["global"]["balanced_accuracy"]
    assert base < 0.65
    for result in (weighted, listed):
        assert result.summary["metrics"]["global"]["balanced_accuracy"] > base + 0.1


def test_rare_classes_are_noted_wherever_the_rows_are_from(rare):
    frame = pd.read_csv(rare / "t.csv")
    with pytest.warns(FedbayesWarning, match="of the training rows have class 'yes'"):
        FederatedClassifier(rounds=1).fit(frame[["a", "b"]], frame.died, clients=frame.site)


def test_a_model_that_predicts_one_class_is_said_to(rare, capsys):
    """Notes before the run, its summary, evaluate and predict; balanced accuracy leads."""
    frame = pd.read_csv(rare / "t.csv")
    frame[["a", "b"]] = np.random.default_rng(1).normal(size=(1200, 2)).round(6)
    frame.to_csv(rare / "noise.csv", index=False)
    words = [f"data.path={rare / 'noise.csv'}", "data.label=died", "data.group=site", "rounds=4"]
    given = [word for one in [*words, "model.hidden=[]"] for word in ("--set", one)]
    assert command("run", *given, "--out", rare / "one") == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "of the training rows have class 'yes', so accuracy is not informative; use" in said
    assert "the global model predicts one class for all test rows" in said
    assert said.index("global balanced accuracy") < said.index("global accuracy")
    model, data = rare / "one" / "model.safetensors", f"data.path={rare / 'noise.csv'}"
    assert command("evaluate", model, "--set", data) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "predicts one class for all rows" in said
    assert "has the training data of the model" in said
    assert said.index("balanced accuracy") < said.index("accuracy")
    assert command("predict", rare / "one", rare / "new.csv", "-o", rare / "one.csv") == 0
    assert "all 1,200 rows are predicted 'no'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"training": {"class_weights": (1.0, 2.0)}}, "2 numbers, but there are 10 classes"),
        (
            {"data": {"name": "diabetes"}, "training": {"class_weights": "balanced"}},
            "training.class_weights has no effect: the likelihood gaussian",
        ),
        (
            {"data": {"name": "diabetes"}, "training": {"focal": 2.0}},
            "training.focal has no effect: the likelihood gaussian",
        ),
        (
            {
                "method": {"name": "fedgvi", "data_loss": "gce"},
                "training": {"class_weights": "balanced"},
            },
            "no effect on method.data_loss = 'gce'",
        ),
        ({"training": {"class_weights": (1.0, -2.0)}}, "class_weights"),
        ({"training": {"class_weights": "equal"}}, "class_weights"),
    ],
)
def test_weights_without_effect_are_an_error(tmp_path, settings, told):
    with pytest.raises(ConfigError, match=told):
        fedbayes.run(rounds=1, folder=tmp_path / "run", **settings)


def test_thresholds_of_predict(rare, plain, tmp_path, capsys):
    def predicted(*words):
        out = tmp_path / "p.csv"
        status = command(
            *("predict", rare / "plain", rare / "new.csv", "-o", out, "--overwrite", *words)
        )
        assert status == 0, capsys.readouterr().err
        return pd.read_csv(out)

    usual = predicted()
    assert (usual.predicted == np.where(usual.p_yes > 0.5, "yes", "no")).all()
    for words, least in (("0.1", 0.1), ("cost:9", 0.1), ("cost:0.25", 0.8)):
        found = predicted("--threshold", words)
        assert (found.predicted == np.where(found.p_yes >= least, "yes", "no")).all()
        assert found.p_yes.equals(usual.p_yes)
    capsys.readouterr()
    found = predicted("--threshold", "youden")
    said = capsys.readouterr().out
    assert "on the" in said
    assert "test rows that chose it" in said
    assert (found.predicted == "yes").sum() > (usual.predicted == "yes").sum()
    assert (
        command(
            *("predict", rare / "plain", rare / "new.csv", "-o", tmp_path / "j.csv"),
            "--json",
            "--threshold",
            "0.3",
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["threshold"] == 0.3
    for words, told in (
        ("1.5", "a probability between 0 and 1"),
        ("cost", "give a number such as 0.2, youden, or cost:C"),
        ("cost:-1", "above 0"),
    ):
        out = ("-o", tmp_path / "q.csv", "--threshold", words)
        assert command("predict", rare / "plain", rare / "new.csv", *out) == 2
        assert told in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "q.csv").exists()
    model = rare / "plain" / "model.safetensors"
    assert command("predict", model, rare / "new.csv", *out[:2], "--threshold", "youden") == 2
    assert "test rows of a run" in capsys.readouterr().err


def test_youden_is_the_best_of_all_thresholds():
    rng = np.random.default_rng(0)
    positive = rng.random(200) < 0.2
    p = np.round((rng.normal(size=200) + positive).clip(-3, 4) / 8 + 0.4, 2)
    found, sensitivity, specificity = youden(p, positive)
    best = max(
        (p[positive] >= t).mean() + (p[~positive] < t).mean() for t in np.arange(0, 1, 0.005)
    )
    assert sensitivity == pytest.approx((p[positive] >= found).mean())
    assert specificity == pytest.approx((p[~positive] < found).mean())
    assert sensitivity + specificity == pytest.approx(best)
