"""What uncertainty is worth: against plain loops and scikit-learn, and of the model of a run."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import fedbayes
from fedbayes.core.metrics import CONFIDENCES, Confidences, calibrate
from fedbayes.core.seals import sealed_table, unsealed_table
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, DataError
from fedbayes.likelihoods.bernoulli import Bernoulli
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.gaussian import Gaussian
from fedbayes.likelihoods.measures import measured, predictions
from fedbayes.likelihoods.multilabel import Multilabel
from fedbayes.likelihoods.trust import examine, unsure
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.experiments.ood_inputs import check_foreign, foreign_file, foreign_inputs
from fedbayes.workflows.experiments.uncertainty import separation, trial_file, try_model

CLASSES = Target("class", ("a", "b", "c"))


@given(st.integers(0, 10**6), st.integers(1, 400), st.floats(0.05, 5))
def test_counts_by_confidence_say_what_the_predictions_do(seed, samples, skew):
    """The calibration error exactly, whatever the skew; coverage and risk within a bin."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(5, skew, samples)
    confidence[rng.random(samples) < 0.05] = 0.0  # nothing was predicted
    right = (rng.random(samples) < confidence) & (confidence > 0)
    c, r = torch.tensor(confidence), torch.tensor(right)
    half = samples // 2
    found = Confidences.of(c[:half], r[:half]) + Confidences.of(c[half:], r[half:])
    expected = calibrate(c, r)
    assert found.calibration().count.tolist() == expected.count.tolist()
    assert found.calibration().untold == expected.untold
    assert found.calibration().error == pytest.approx(expected.error, abs=1e-9, nan_ok=True)
    assert found.accuracy_at(1.0) == pytest.approx(right.mean())
    # Put the rows of a bin in all orders, on average: by their expected share of wrong ones.
    place = np.searchsorted(CONFIDENCES.numpy(), confidence)
    risks, done, wrong = [], 0, 0.0
    for one in sorted(set(place), reverse=True):
        inside = place == one
        share = 1 - right[inside].mean()
        for _ in range(inside.sum()):
            done, wrong = done + 1, wrong + share
            risks.append(wrong / done)
    assert found.aurc == pytest.approx(np.mean(risks), abs=1e-9)


def test_no_predictions_have_no_curve():
    found = Confidences.of(torch.empty(0), torch.empty(0, dtype=torch.bool))
    assert math.isnan(found.aurc)
    assert math.isnan(found.accuracy_at(0.5))


def entropies(p):
    return -(p * np.log(p)).sum(axis=-1)


@pytest.mark.parametrize("kind", [Categorical, Bernoulli])
def test_errors_told_by_entropy(kind):
    target = CLASSES if kind is Categorical else Target("class", ("no", "yes"))
    likelihood, rng = kind(target=target), torch.Generator().manual_seed(0)
    draws = 2 * torch.randn(5, 80, likelihood.outputs, generator=rng).double()
    y = torch.randint(target.classes, (80,), generator=rng)
    p = likelihood.mean(draws).numpy()
    wrong = p.argmax(axis=1) != y.numpy()
    expected = roc_auc_score(wrong, entropies(p))
    columns = predictions(likelihood, ["error_auroc"], draws, y)
    found = {n: c for n, c in columns.items() if n.startswith("prediction/")}
    assert measured(["error_auroc"], found)["error_auroc"] == pytest.approx(expected)
    each = likelihood.normalized(draws).exp().numpy()
    information = entropies(p) - entropies(each).mean(axis=0)
    told = unsure(likelihood, draws)
    assert told["information"].numpy() == pytest.approx(information, abs=1e-9)
    known = separation(told["information"][~wrong], told["information"][wrong])
    assert known == pytest.approx(roc_auc_score(wrong, information))
    assert unsure(likelihood, draws[:1]).keys() == {"entropy"}
    right = torch.from_numpy(p.argmax(axis=1))
    only = predictions(likelihood, ["error_auroc"], draws, right)
    assert math.isnan(measured(["error_auroc"], only)["error_auroc"])  # there are no errors


def test_how_unsure_numbers_and_labels_are():
    rng = torch.Generator().manual_seed(1)
    target = Target("real", ("x", "y"), (1.0, 2.0), (3.0, 0.5))
    numbers = Gaussian(target=target)
    draws = torch.randn(4, 30, numbers.outputs, generator=rng)
    draws = numbers.head()(draws) if numbers.head() is not None else draws
    means, variances = numbers.moments(draws.double())
    between = means.var(dim=0, correction=0)
    total = (variances.mean(dim=0) + between).sqrt() / torch.tensor([3.0, 0.5])
    found = unsure(numbers, draws)
    torch.testing.assert_close(found["std"], total.mean(dim=1))
    assert (found["std_between"] <= found["std"] + 1e-12).all()
    labels = Multilabel(target=Target("labels", ("a", "b")))
    draws = torch.randn(3, 30, 2, generator=rng)
    p = torch.sigmoid(draws.double()).mean(dim=0).numpy()
    both = entropies(np.stack([p, 1 - p], axis=-1)).sum(axis=-1)
    assert unsure(labels, draws)["entropy"].numpy() == pytest.approx(both)


def test_what_is_not_finite_is_least_sure():
    likelihood = Categorical(target=CLASSES)
    logits = torch.tensor([[0.0, 0.0, 0.0], [torch.nan, 0.0, 0.0]])
    found = unsure(likelihood, logits[None])["entropy"]
    assert found.tolist() == [pytest.approx(math.log(3)), math.inf]
    assert separation(found[:1], found[1:]) == 1.0
    assert math.isnan(separation(found, found[:0]))
    trust = examine(likelihood, [(lambda x: x[None], Samples(logits, torch.tensor([0, 1])))])
    assert trust.uncertainty is None  # a single draw has no mutual information
    assert trust.confidences.rows[0] == 1


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial") / "run"
    fedbayes.run(
        rounds=2,
        data={"clients": 3, "limit": 800},
        model={"hidden": [16]},
        method={"name": "pvi"},
        folder=folder,
    )
    return RunFolder(folder)


def test_the_trial_of_a_run(ended):
    """Each number again, from the outputs of its model on its test samples."""
    found = try_model(ended.path, "inverted")
    config = ended.config()
    data = stored_data(config, ended)
    run = stored_run(ended, config, data.preprocessing)
    draw = config.build_method().draws(ended.model(), run)
    tests = data.test_union(0, data.test_total)
    inverted = 16 - data.raw_test(0, data.test_total).float()
    with torch.no_grad():
        p, q = (
            run.likelihood.mean(draw(x).double()).numpy()
            for x in (tests.x, data.preprocessing.apply(inverted))
        )
    wrong = p.argmax(axis=1) != tests.y.numpy()
    cool = p ** (1 / ended.summary()["temperature"])
    cool /= cool.sum(axis=1, keepdims=True)
    errors = roc_auc_score(wrong, entropies(cool))
    assert found.metrics["error_auroc"] == pytest.approx(errors, abs=1e-9)
    truth = np.repeat([0, 1], [len(p), len(q)])
    strange = roc_auc_score(truth, entropies(np.concatenate([p, q])))
    assert found.metrics["ood_auroc"] == pytest.approx(strange, abs=1e-9)
    brier = ((cool - np.eye(10)[tests.y]) ** 2).sum(axis=1).mean()
    assert found.metrics["brier"] == pytest.approx(brier)
    assert {"error_auroc_information", "ood_auroc_information"} <= found.metrics.keys()
    assert found.selective[-1] == pytest.approx(1 - wrong.mean(), abs=1e-6)
    assert sum(count for _, _, count in found.reliability) == len(p)
    assert "inverted" in found.foreign


def test_a_trial_is_kept_while_model_and_inputs_stay(ended):
    file = trial_file(ended)
    first = try_model(ended.path, "noise")
    before = file.stat().st_mtime_ns
    assert try_model(ended.path, "noise") == first
    assert file.stat().st_mtime_ns == before
    known = unsealed_table(file.read_bytes())
    for other in ({"model": "another", "metrics": {"ood_auroc": 0.0}}, {"file": "another"}):
        file.write_bytes(sealed_table(known | other))
        assert try_model(ended.path, "noise") == first
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"metrics": {"ood_auroc": 0.0}}))
    assert try_model(ended.path, "noise") == first
    file.write_text("{")
    assert try_model(ended.path, "noise") == first
    assert try_model(ended.path, "none").foreign == ""


def test_foreign_inputs_are_what_they_are_called(ended):
    config = ended.config()
    data = stored_data(config, ended)
    x = data.test_union(0, data.test_total).x

    def made(kind):
        return foreign_inputs(data, config.data, kind)

    permuted = made("auto")
    assert permuted.name == "permuted"
    assert torch.equal(permuted.x.flatten(1).sort()[0], x.flatten(1).sort()[0])
    assert not torch.equal(permuted.x, x)
    order = [  # each place of a permuted image holds one place of the image
        next(j for j in range(64) if torch.equal(permuted.x.flatten(1)[:, i], x.flatten(1)[:, j]))
        for i in range(20, 40)
    ]
    assert len(set(order)) > 10
    wide = made("wide").x
    assert wide.shape == x.shape
    assert float(wide.std()) == pytest.approx(3, rel=0.05)
    noise = made("noise").x
    raw = noise * torch.tensor(data.preprocessing.std[0] * 16) + data.preprocessing.mean[0] * 16
    assert -1e-4 <= float(raw.min()) < 0.2 < 15.8 < float(raw.max()) <= 16.001
    assert torch.equal(made("wide").x, wide)  # the seed's
    assert made("none") is None
    with pytest.raises(ConfigError, match=r"is the training data of the models\. Choose"):
        made("digits")
    with pytest.raises(DataError, match="samples of shape"):
        made("diabetes")


@pytest.mark.data
def test_a_data_set_without_an_order_of_pixels_is_none(ended):
    config = ended.config()
    with pytest.raises(DataError, match="its pixel order depends on the"):
        foreign_inputs(stored_data(config, ended), config.data, "permuted-mnist")


def test_rows_of_a_file_are_foreign_inputs(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{a},{b},{int(a > 0)}" for a, b in rng.normal(size=(120, 2))]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["a,b,label", *lines]))
    other = tmp_path / "other.csv"
    other.write_text("b,a\n9,50\n8,60\n")
    settings = {"path": str(table), "clients": 2, "partition": "iid"}
    run = fedbayes.run(rounds=1, data=settings, folder=tmp_path / "run")
    config = run.folder.config()
    data = stored_data(config, run.folder)
    found = foreign_inputs(data, config.data, str(other))
    assert torch.equal(found.x, data.preprocessing.apply(np.array([[50.0, 9], [60, 8]], "f")))
    book = tmp_path / "other#1.xlsx"
    with pd.ExcelWriter(book) as file:
        for sheet, shift in (("May", 0), ("June #2", 1)):
            pd.DataFrame({"b": [9, 8], "a": [50 + shift, 60]}).to_excel(
                file, sheet_name=sheet, index=False
            )
    with pytest.raises(DataError, match=r"sheets May, June #2\. Choose one"):
        foreign_inputs(data, config.data, str(book))
    for sheet, first in (("May", 50.0), ("June #2", 51.0)):
        x = foreign_inputs(data, config.data, f"{book}#{sheet}").x
        assert torch.equal(x, data.preprocessing.apply(np.array([[first, 9], [60, 8]], "f")))
    assert foreign_file(f"{book}#May") == foreign_file(str(book)) != ""
    assert foreign_inputs(data, config.data, "auto").name == "wide"
    with pytest.raises(ConfigError, match=r"works only with images\. For rows, choose wide"):
        foreign_inputs(data, config.data, "inverted")


@pytest.mark.parametrize(
    ("asked", "words"),
    [("wid", "did you mean 'wide'"), ("no.csv", "file not found"), ("a.txt", "file not found")],
)
def test_foreign_inputs_that_there_are_not(asked, words):
    with pytest.raises(ConfigError, match=words):
        check_foreign(asked)
