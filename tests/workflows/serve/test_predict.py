"""`fedbayes predict`: against `evaluate`, against other programs, in any piece, of bad files."""

import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import fedbayes
from fedbayes.data.sources.streams import Rows
from fedbayes.data.tables.columns import Column
from fedbayes.errors import ConfigError, DataError, FedbayesError, ModelError
from fedbayes.likelihoods.conformal import Conformal
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.export import export
from tests.helpers.command_line import cli
from tests.helpers.small_files import text

ROWS = 240


@pytest.fixture(scope="module")
def patients():
    """A table with ids that look like numbers, gaps, a label and an amount."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "patient": [f"{i:05d}" for i in range(ROWS)],
            "age": rng.normal(50, 10, ROWS).round(1),
            "bmi": rng.normal(25, 4, ROWS).round(2),
            "site": rng.choice(["a", "b", "c"], ROWS),
        }
    )
    risk = frame.age / 10 + frame.bmi / 5 - 10 + rng.normal(size=ROWS)
    frame["ill"] = np.where(risk > 0, "yes", "no")
    frame["cost"] = (1000 * (risk + 5)).round()
    frame.loc[::17, "bmi"] = np.nan
    frame.loc[5, "patient"] = "NA"
    return frame


@pytest.fixture(scope="module")
def place(tmp_path_factory, patients):
    folder = tmp_path_factory.mktemp("predict")
    patients.to_csv(folder / "patients.csv", index=False)
    patients.to_csv(folder / "packed.csv.gz", index=False)
    patients.to_parquet(folder / "patients.parquet")
    patients.to_csv(folder / "european.csv", index=False, sep=";", decimal=",")
    return folder


def trained(folder, path, label, **settings):
    drop = [name for name in ("patient", "ill", "cost") if name != label]
    data = {"path": str(path), "label": [label], "group": "site", "drop": drop}
    data |= {"missing": "impute"}
    return fedbayes.run(folder=folder, data=data, rounds=3, calibration="none", **settings)


@pytest.fixture(scope="module")
def classes(place):
    return trained(place / "classes", place / "patients.csv", "ill")


@pytest.fixture(scope="module")
def numbers(place):
    return trained(place / "numbers", place / "patients.csv", "cost")


@pytest.fixture(scope="module")
def posterior(place):
    method = {"name": "virtual", "predictions": 7}
    return trained(place / "posterior", place / "patients.csv", "ill", method=method)


def predict(tmp_path, model, inputs, name="out.csv", **options):
    out = tmp_path / name
    fedbayes.predict_file(model, inputs, out, **options)
    return text(out) if name.endswith((".csv", ".gz")) else pd.read_parquet(out)


def numeric(frame, columns=("p_no", "p_yes")):
    return frame[list(columns)].astype(float).to_numpy()


def test_answers_are_those_of_the_network(tmp_path, classes, place, patients):
    """Against the matrix products by hand, in the order of the rows."""
    found = predict(tmp_path, place / "classes", place / "patients.csv")
    assert list(found.columns) == ["patient", "site", "ill", "cost", "p_no", "p_yes", "predicted"]
    assert found.patient.tolist() == patients.patient.tolist()
    x = patients[["age", "bmi"]].to_numpy(np.float64)
    mean, std = (np.array(v) for v in (classes.preprocessing.mean, classes.preprocessing.std))
    hidden = np.nan_to_num((x - mean) / std)
    weights = {name: tensor.double().numpy() for name, tensor in classes.model.items()}
    layers = sorted(name.removesuffix(".weight") for name in weights if name.endswith("weight"))
    for place_, layer in enumerate(layers):
        hidden = hidden @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        hidden = np.maximum(hidden, 0) if place_ < len(layers) - 1 else hidden
    p = np.exp(hidden) / np.exp(hidden).sum(1, keepdims=True)
    np.testing.assert_allclose(numeric(found), p, atol=2e-6)
    assert (found.predicted == np.array(["no", "yes"])[p.argmax(1)]).all()


def test_the_same_as_evaluate(tmp_path, classes, place, capsys):
    export = tmp_path / "model.safetensors"
    assert cli(capsys, "export", place / "classes", "-o", export)[0] == 0
    given = f"data.path={place / 'patients.csv'}"
    code, out, _ = cli(capsys, "evaluate", export, "--set", given, "--json")
    assert code == 0
    score = json.loads(out)[0]
    for model in (place / "classes", export):
        found = predict(tmp_path, model, place / "patients.csv", overwrite=True)
        assert (found.predicted == found.ill).mean() == pytest.approx(score["accuracy"])
        p = np.where(found.ill == "yes", *numeric(found).T[::-1])
        assert -np.log(p).mean() == pytest.approx(score["nll"], rel=1e-5)


def test_rows_in_other_units_are_noticed(tmp_path, classes, place, patients):
    for scale, told in ((1, False), (10, True)):
        patients.assign(age=patients.age * scale).to_csv(tmp_path / "new.csv", index=False)
        out = tmp_path / f"{scale}.csv"
        found = fedbayes.predict_file(place / "classes", tmp_path / "new.csv", out, rows=50)
        assert [n for n in found.notes if "same units" in n] == [
            f"{tmp_path / 'new.csv'}: values of 'age' are far from those of the training rows. "
            "Check that they are in the same units"
        ] * told


def test_numbers_have_intervals_of_the_likelihood(tmp_path, numbers, place, patients):
    for level in (None, 0.5):
        found = predict(
            tmp_path, place / "numbers", place / "patients.csv", level=level, overwrite=True
        )
        assert list(found.columns) == [*("patient", "site", "ill", "cost"), "mean", "low", "high"]
        frame = patients[["bmi", "age"]]
        mean = numbers.trained().expectation(frame)[:, 0].numpy()
        low, high = (end[:, 0].numpy() for end in numbers.interval(frame, level or 0.9))
        columns = numeric(found, ("mean", "low", "high"))
        np.testing.assert_allclose(columns, np.stack([mean, low, high], 1), rtol=1e-6)
        rmse = np.sqrt(((columns[:, 0] - patients.cost) ** 2).mean())
        assert rmse < patients.cost.std()


@pytest.mark.parametrize("name", ["patients.parquet", "packed.csv.gz", "european.csv"])
@pytest.mark.parametrize("out", ["out.csv", "out.csv.gz", "out.parquet"])
def test_any_format_says_the_same(tmp_path, classes, place, name, out):
    wanted = predict(tmp_path, place / "classes", place / "patients.csv", "wanted.csv")
    found = predict(tmp_path, place / "classes", place / name, out)
    np.testing.assert_allclose(numeric(found), numeric(wanted), atol=1e-6)
    assert found.predicted.tolist() == wanted.predicted.tolist()
    assert found.patient.tolist() == wanted.patient.tolist()  # 00007 and NA stay what they are
    assert found.site.tolist() == wanted.site.tolist()


@pytest.mark.parametrize("name", ["patients.csv", "patients.parquet", "packed.csv.gz"])
@pytest.mark.parametrize("rows", [9, 10**6])
def test_pieces_of_any_size_say_the_same(tmp_path, posterior, place, name, rows):
    wanted = fedbayes.load(place / "posterior").predict_frame(pd.read_csv(place / "patients.csv"))
    watched = []
    found = predict(
        tmp_path, place / "posterior", place / name, "o.parquet", rows=rows, watch=watched.append
    )
    assert list(found.columns)[4:] == list(wanted.columns)[4:]
    for column in ("p_no", "p_yes", "std_yes", "entropy", "mutual_information"):
        np.testing.assert_allclose(found[column], wanted[column], atol=2e-6)
    assert found.predicted.tolist() == wanted.predicted.tolist()
    assert watched == sorted(watched)
    assert len(watched) == -(-ROWS // rows)
    assert watched[-1] == 1.0


def test_what_draws_say_of_uncertainty(posterior, place, patients):
    """Against plain loops over the draws."""
    frame = posterior.predict_frame(patients)
    each = posterior.draws()(patients).softmax(-1).double().numpy()
    assert len(each) == 7
    mean = each.mean(0)
    np.testing.assert_allclose(frame[["p_no", "p_yes"]], mean, atol=1e-6)
    np.testing.assert_allclose(frame[["std_no", "std_yes"]], each.std(0), atol=1e-6)
    entropy = -(mean * np.log(mean)).sum(-1)
    inside = -(each * np.log(each)).sum(-1).mean(0)
    np.testing.assert_allclose(frame.entropy, entropy, atol=1e-5)
    np.testing.assert_allclose(frame.mutual_information, entropy - inside, atol=1e-5)
    assert frame.mutual_information.max() > 0


def test_several_models_are_the_mean_of_their_predictions(tmp_path, classes, posterior, place):
    names = [place / "classes", place / "posterior"]
    frame = pd.read_csv(place / "patients.csv")
    alone = [fedbayes.load(name).expectation(frame) for name in names]
    both = fedbayes.load(*names)
    torch.testing.assert_close(both.expectation(frame), (alone[0] + alone[1]) / 2)
    assert "mutual_information" in both.predict_frame(frame)


def test_a_clients_own_model(tmp_path, posterior, place, patients, capsys):
    wanted = posterior.predictor("b")(patients).exp().numpy()
    out = tmp_path / "own.csv"
    code, _, err = cli(
        capsys, "predict", place / "posterior", place / "patients.csv", "-o", out,
        "--client", "b",
    )  # fmt: skip
    assert code == 0, err
    np.testing.assert_allclose(numeric(text(out)), wanted, atol=1e-6)
    whole = posterior.trained().expectation(patients).numpy()
    assert abs(whole - wanted).max() > 1e-3


@pytest.mark.parametrize("label", ["ill", "cost"])
def test_a_program_says_the_same(tmp_path, classes, numbers, place, label, capsys):
    """The `.pt2` with PyTorch alone, and given to `predict`."""
    run = {"ill": "classes", "cost": "numbers"}[label]
    program = tmp_path / "model.pt2"
    assert cli(capsys, "export", place / run, "-o", program)[0] == 0
    frame = pd.read_csv(place / "patients.csv")
    raw = torch.from_numpy(frame[["age", "bmi"]].to_numpy(np.float32))
    answer = torch.export.load(program).module()(raw).detach()
    columns = ["p_no", "p_yes"] if label == "ill" else ["mean"]
    answer = answer.softmax(-1) if label == "ill" else answer
    if label == "cost":
        with pytest.warns(UserWarning, match="means, so there are no intervals"):
            found = predict(tmp_path, program, place / "patients.csv")
        with pytest.raises(ConfigError, match=r"model\.pt2 has no intervals: it gives only means"):
            predict(tmp_path, program, place / "patients.csv", "two.csv", level=0.8)
    else:
        found = predict(tmp_path, program, place / "patients.csv")
    whole = predict(tmp_path, place / run, place / "patients.csv", "run.csv")
    np.testing.assert_allclose(numeric(found, columns), answer.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numeric(whole, columns), answer.numpy(), rtol=1e-5, atol=1e-6)


def test_images_from_arrays(tmp_path):
    run = fedbayes.run(folder=tmp_path / "run", data={"clients": 3}, rounds=1)
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = digits.images[:50].astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x, id=np.array([f"n{i}" for i in range(50)]), y=digits.target)
    done = fedbayes.predict_file(
        fedbayes.load(run.folder.path), tmp_path / "x.npz", tmp_path / "o.csv", rows=20
    )
    found = text(tmp_path / "o.csv")
    assert found.id.tolist() == [f"n{i}" for i in range(50)]
    assert "'y' left out" in done.notes[0] or "y left out" in done.notes[0]
    p = found[[f"p_{k}" for k in range(10)]].astype(float).to_numpy()
    np.testing.assert_allclose(p, run.predictor()(x).exp().numpy(), atol=1e-6)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)


def test_labels_and_several_targets(tmp_path):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(120, 3)), columns=["u", "v", "w"])
    frame["early"] = (frame.u > 0).astype(int)
    frame["late"] = (frame.v > 0.5).astype(int)
    frame["dose"], frame["days"] = 3 * frame.u + 100, frame.v - frame.w
    frame.to_csv(tmp_path / "t.csv", index=False)
    features = ["u", "v", "w"]
    for name, labels in (("labels", ["early", "late"]), ("numbers", ["dose", "days"])):
        data = {"path": str(tmp_path / "t.csv"), "label": labels, "features": features}
        run = fedbayes.run(
            folder=tmp_path / name,
            data=data | {"clients": 3, "partition": "iid"},
            rounds=3,
            calibration="none",
            method={"name": "virtual"} if name == "labels" else {"name": "fedavg"},
        )
        found = run.predict_frame(frame[features])
        mean = run.trained().expectation(frame[features]).numpy()
        if name == "labels":
            assert list(found)[:2] == ["p_early", "p_late"]
            each = run.draws()(frame[features]).sigmoid().double().numpy()
            np.testing.assert_allclose(found[["p_early", "p_late"]], mean, atol=1e-6)
            np.testing.assert_allclose(found.std_late, each.std(0)[:, 1], atol=1e-6)
            p = mean[:, 1].astype(float)
            entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
            np.testing.assert_allclose(found.entropy_late, entropy, atol=1e-5)
            within = -(each * np.log(each) + (1 - each) * np.log(1 - each)).mean(0)[:, 1]
            np.testing.assert_allclose(found.mutual_information_late, entropy - within, atol=1e-5)
        else:
            names = [f"{kind}_{one}" for kind in ("mean", "low", "high") for one in labels]
            assert sorted(found)[: len(names)] == sorted(names)
            np.testing.assert_allclose(found[["mean_dose", "mean_days"]], mean, rtol=1e-5)
            assert (found.low_days < found.mean_days).all()
            assert (found.mean_days < found.high_days).all()


def test_quantiles_give_the_widest_interval_they_have(tmp_path, place):
    task = {"likelihood": "quantile", "levels": [0.1, 0.5, 0.9]}
    run = trained(tmp_path / "run", place / "patients.csv", "cost", task=task)
    frame = pd.read_csv(place / "patients.csv")
    with pytest.warns(UserWarning, match="no interval of level 90%; low and high use 80%"):
        found = run.predict_frame(frame)
    low, high = run.interval(frame, 0.8)
    np.testing.assert_allclose(found.low, low[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.high, high[:, 0], rtol=1e-6)
    with pytest.raises(ConfigError, match="an interval needs the quantile of level"):
        run.predict_frame(frame, level=0.9)


def test_inputs_are_kept_if_asked(tmp_path, classes, place, patients):
    found = predict(tmp_path, place / "classes", place / "patients.csv", keep_inputs=True)
    assert list(found.columns)[4:6] == ["age", "bmi"]
    np.testing.assert_allclose(found.age.astype(float), patients.age)


def write(path, change, patients):
    frame = change(patients.head(30).copy())
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return path


BAD = {
    "absent column": (
        lambda f: f.rename(columns={"bmi": "BMI"}),
        "has no column 'bmi', which the model of .* needs .did you mean 'BMI'",
    ),
    "text": (
        lambda f: f.assign(age=f.age.astype(object).where(f.index != 20, "old")),
        r"column 'age' has 1 cell that is not a number \('old' in row 21",
    ),
    "infinite": (
        lambda f: f.assign(age=f.age.where(f.index != 20, np.inf)),
        "column 'age' is infinite, or too large for float32, in row 21",
    ),
    "too large": (
        lambda f: f.assign(age=f.age.where(f.index != 20, 1e300)),
        "column 'age' is infinite, or too large for float32, in row 21",
    ),
    "no rows": (lambda f: f.head(0), "has no rows to predict"),
    "taken": (lambda f: f.assign(predicted=1), "has a column 'predicted'"),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_tables_leave_nothing(tmp_path, classes, place, patients, kind, suffix):
    change, words = BAD[kind]
    if kind == "text" and suffix == ".parquet":
        change = lambda f: f.assign(age=f.age.astype(str).where(f.index != 20, "old"))  # noqa: E731
        words = "column 'age' has"
    inputs = write(tmp_path / f"bad{suffix}", change, patients)
    with pytest.raises(DataError, match=words) as error:
        predict(tmp_path, place / "classes", inputs, rows=8)
    assert str(inputs) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [inputs.name]


def test_what_is_there_stays(tmp_path, classes, place):
    (tmp_path / "out.csv").write_text("mine")
    with pytest.raises(FedbayesError, match=r"out.csv already exists\. Give another file, or"):
        predict(tmp_path, place / "classes", place / "patients.csv")
    assert (tmp_path / "out.csv").read_text() == "mine"
    bad = tmp_path / "bad.csv"
    bad.write_text("age,bmi\n1,x\n")
    with pytest.raises(DataError):
        predict(tmp_path, place / "classes", bad, overwrite=True)
    assert (tmp_path / "out.csv").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty. Its first line must have the column names"),
        ("age,bmi,age\n1,2,3\n", "has two columns 'age'"),
        ("age,bmi\n1,2,3\n", "more values than its first line has names"),
        ("age,bmi\n1,2\n", None),
    ],
)
def test_files_that_are_no_tables(tmp_path, classes, place, content, words):
    path = tmp_path / "new.csv"
    path.write_text(content)
    if words is None:
        assert len(predict(tmp_path, place / "classes", path)) == 1
        return
    with pytest.raises(DataError, match=words):
        predict(tmp_path, place / "classes", path)


def test_damaged_and_foreign_files(tmp_path, classes, place):
    packed = gzip.compress((place / "patients.csv").read_bytes())
    for name, content in (
        ("cut.csv.gz", packed[: len(packed) // 2]),
        ("no.parquet", b"PAR1 no"),
        ("no.npz", b"PK"),
        ("latin.csv", "é,bmi\n1,2\n".encode("latin-1") + b"\x81"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            predict(tmp_path, place / "classes", path)
    (tmp_path / "table.xls").write_bytes(b"")
    with pytest.raises(DataError, match=r"table.xls has no format that can be read\. Give"):
        predict(tmp_path, place / "classes", tmp_path / "table.xls")
    for absent in ("absent.csv", "photos"):  # of which the other might be pictures
        with pytest.raises(DataError, match=rf"file or folder not found: .*{absent}"):
            predict(tmp_path, place / "classes", tmp_path / absent)
    assert not (tmp_path / "out.csv").exists()


def test_models_that_cannot_say_what_they_read(tmp_path, classes, numbers, place):
    bare = tmp_path / "bare.pt"
    torch.save({name: tensor.clone() for name, tensor in classes.model.items()}, bare)
    with pytest.raises(ModelError, match="has no card"):
        fedbayes.load(bare)
    with pytest.raises(ModelError, match=r"run folder or model file not found: .*absent"):
        fedbayes.load(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"predicts the classes no, yes, and .*numbers real"):
        fedbayes.load(place / "classes", place / "numbers")
    with pytest.raises(
        FedbayesError, match="clients keep no model between rounds under fedavg, but"
    ):
        fedbayes.load(place / "classes", client="a")
    with pytest.raises(FedbayesError, match=r"is a single model\. Leave it out"):
        fedbayes.load(place / "classes" / "model.safetensors", client="a")


def test_a_model_of_arrays_takes_no_table(tmp_path, place):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(60, 2)), y=rng.integers(0, 2, 60))
    data = {"path": str(tmp_path / "a.npz"), "clients": 2, "partition": "iid"}
    run = fedbayes.run(folder=tmp_path / "run", data=data, rounds=1)
    with pytest.raises(DataError, match="but this model"):
        predict(tmp_path, run.folder.path, place / "patients.csv")
    np.savez(tmp_path / "b.npz", y=[1])
    with pytest.raises(DataError, match="It has y"):
        predict(tmp_path, run.folder.path, tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.zeros((3, 5)))
    with pytest.raises(DataError, match=r"c.npz: the samples have shape \(3, 5\)"):
        predict(tmp_path, run.folder.path, tmp_path / "c.npz")


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Pieces are handed on one by one: none is read before the one before it is done with."""
    path = tmp_path / "long.csv"
    path.write_text("a,b\n" + "1,2\n" * 400_000)
    rows = Rows(path, (Column("a"),), size=1000)
    first = next(iter(rows))
    assert len(first.x) == 1000
    assert rows.share < 0.5


def test_the_command(tmp_path, classes, place, capsys):
    out = tmp_path / "out.csv"
    arguments = ("predict", place / "classes", place / "patients.csv", "-o", out)
    code, said, err = cli(capsys, *arguments, "--json")
    assert code == 0
    told = json.loads(said)
    assert told["rows"] == ROWS
    assert told["columns"] == ["p_no", "p_yes", "predicted"]
    assert told["missing"] == 15
    assert "15 of 240 rows have an empty cell" in err
    code, said, err = cli(capsys, *arguments)
    assert code == 2
    assert "exists already" in err
    assert cli(capsys, *arguments, "--overwrite")[0] == 0
    rows = tmp_path / "rows.csv"
    rows.write_bytes((place / "patients.csv").read_bytes())
    onto = ("predict", place / "classes", rows, "-o", rows, "--overwrite")
    assert "would replace one of the inputs" in cli(capsys, *onto)[2]
    assert rows.read_bytes() == (place / "patients.csv").read_bytes()
    code, _, err = cli(capsys, *arguments, "--overwrite", "--level", "0.8")
    assert code == 2
    assert "intervals need numbers" in err
    code, _, err = cli(capsys, *arguments, "--overwrite", "--set", "rounds=3")
    assert "--set rounds=3 has no effect" in err


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A run on categories coded as numbers and as text, dates, booleans, and gaps in all."""
    folder = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(2)
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, ROWS), unit="D")
    frame = pd.DataFrame(
        {
            "id": [f"{k:04d}" for k in range(ROWS)],
            "grade": rng.choice(["01", "02", "10"], ROWS),
            "sex": rng.choice(["f", "m", None], ROWS),
            "seen": days.strftime("%Y-%m-%d"),
            "smokes": rng.choice(np.array([True, False, None]), ROWS),
            "age": rng.normal(50, 9, ROWS).round(1),
        }
    )
    frame.loc[::11, "age"] = np.nan
    frame["ill"] = np.where(rng.normal(size=ROWS) + (frame.sex == "m") > 0.5, "yes", "no")
    frame.to_csv(folder / "t.csv", index=False)
    data = {"path": str(folder / "t.csv"), "drop": ["id"], "categorical": ["grade"]}
    run = fedbayes.run(
        folder=folder / "run",
        data=data | {"label": ["ill"], "clients": 3, "partition": "iid"},
        rounds=2,
    )
    return folder, frame, run


@pytest.mark.parametrize("rows", [7, 1000])
def test_columns_of_any_kind_in_pieces_of_any_size(mixed, tmp_path, rows):
    """As `evaluate` reads them, which reads the whole file; a piece of one row has all cells of a
    column empty, or all of another type.
    """
    folder, frame, run = mixed
    found = predict(tmp_path, folder / "run", folder / "t.csv", rows=rows)
    assert list(found.columns) == ["id", "ill", "p_no", "p_yes", "predicted"]
    assert found.id.tolist() == frame.id.tolist()
    tests = find_tests(folder / "run" / "model.safetensors", None, [f"data.path={folder}/t.csv"])
    p = run.trained().expectation(tests.samples.x).numpy()
    np.testing.assert_allclose(numeric(found), p, atol=1e-6)
    wanted = run.predict_frame(frame)
    np.testing.assert_allclose(numeric(found), wanted[["p_no", "p_yes"]], atol=1e-6)


def test_a_sheet_of_several_is_chosen(mixed, tmp_path, capsys):
    folder, frame, _ = mixed
    wanted = predict(tmp_path, folder / "run", folder / "t.csv", "wanted.csv")
    book = tmp_path / "t.xlsx"
    with pd.ExcelWriter(book) as file:
        pd.DataFrame({"note": ["of 2021"]}).to_excel(file, sheet_name="about", index=False)
        frame.to_excel(file, sheet_name="stays", index=False)
    arguments = ["predict", folder / "run", book, "-o", tmp_path / "o.csv"]
    code, _, err = cli(capsys, *arguments)
    assert code == 2
    assert "the sheets about, stays. Choose one with sheet" in " ".join(err.split())
    assert cli(capsys, *arguments, "--sheet", "stays")[0] == 0
    found = text(tmp_path / "o.csv")
    assert found.id.tolist() == frame.id.tolist()
    np.testing.assert_allclose(numeric(found), numeric(wanted), atol=1e-6)
    for inputs in (folder / "t.csv", tmp_path / "picture.png"):
        with pytest.raises(FedbayesError, match="has no sheets, so --sheet has no effect"):
            predict(tmp_path, folder / "run", inputs, "p.csv", sheet="stays")


@pytest.mark.parametrize("text", ["x\n1\n\n3\n", "\n\r\nx\n1\n\n3"])
def test_blank_lines_of_one_column_are_rows_with_an_empty_cell(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    (piece,) = Rows(tmp_path / "t.csv", (Column("x"),))
    np.testing.assert_array_equal(piece.x.x, [1, np.nan, 3])
    (tmp_path / "t.csv").write_text("x,y\n1,2\n\n3,4\n")  # of several, no row at all
    (piece,) = Rows(tmp_path / "t.csv", (Column("x"),))
    assert piece.x.x.tolist() == [1, 3]


def test_the_training_file_has_no_unseen_categories(tmp_path):
    """Truth values, decimal commas and codes that are named as categories: as `evaluate` reads
    them, though `predict` reads every cell as text.
    """
    rng = np.random.default_rng(4)
    frame = pd.DataFrame(
        {
            "smokes": rng.choice(["true", "false"], ROWS),
            "dose": rng.choice(["0,5", "1", "2,25"], ROWS),
            "age": rng.normal(50, 9, ROWS).round(1),
        }
    )
    frame["ill"] = np.where(rng.normal(size=ROWS) + (frame.dose == "1") > 0.5, "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False, sep=";", decimal=",")
    data = {"path": str(tmp_path / "t.csv"), "categorical": ["smokes", "dose"], "label": ["ill"]}
    run = fedbayes.run(folder=tmp_path / "run", data=data | {"clients": 2, "partition": "iid"})
    told = fedbayes.predict_file(tmp_path / "run", tmp_path / "t.csv", tmp_path / "o.csv", rows=7)
    assert not [note for note in told.notes if "category" in note]
    tests = find_tests(tmp_path / "run" / "model.safetensors", None, [f"data.path={data['path']}"])
    p = run.trained().expectation(tests.samples.x).numpy()
    np.testing.assert_allclose(numeric(text(tmp_path / "o.csv")), p, atol=1e-6)
    frame.loc[3, "dose"] = "3,5"
    frame.to_csv(tmp_path / "new.csv", index=False, sep=";", decimal=",")
    told = fedbayes.predict_file(tmp_path / "run", tmp_path / "new.csv", tmp_path / "n.csv")
    assert "in 1 row (first in row 4)" in told.notes[-1]


def test_dates_in_two_formats_are_read_as_in_training(tmp_path, capsys):
    rng = np.random.default_rng(5)
    born, day = (
        pd.Timestamp(first) + pd.to_timedelta(rng.integers(0, 900, ROWS), unit="D")
        for first in ("1960-01-01", "2020-01-01")
    )
    frame = pd.DataFrame({"born": born.strftime("%d.%m.%Y"), "day": day.strftime("%Y-%m-%d")})
    frame["ill"] = rng.choice(["yes", "no"], ROWS)
    file = tmp_path / "t.csv"
    frame.to_csv(file, index=False)
    data = {"path": str(file), "dates": ["born"], "date_format": "%d.%m.%Y", "label": ["ill"]}
    run = fedbayes.run(
        folder=tmp_path / "run", data=data | {"clients": 2, "partition": "iid"}, rounds=1
    )
    model = tmp_path / "run" / "model.safetensors"
    x = find_tests(model, None, [f"data.path={file}"]).samples.x
    wanted = predict(tmp_path, tmp_path / "run", file)
    np.testing.assert_allclose(numeric(wanted), run.trained().expectation(x).numpy(), atol=1e-6)
    check = ["data", "check", file, "--like", tmp_path / "run"]
    assert cli(capsys, *check)[0] == 0
    frame.assign(day=None).to_csv(file, index=False)  # empty, and a column of dates all the same
    assert cli(capsys, *check)[0] == 0
    frame.loc[8, "day"] = "soon"
    frame.to_csv(file, index=False)
    with pytest.raises(
        DataError, match=r"'day' has text that is not a date written as 2020.*row 9"
    ):
        find_tests(model, None, [f"data.path={file}"])
    frame.loc[8, "day"] = "31.03.2020"  # the format that other columns have; ISO dates beside it
    frame.to_csv(file, index=False)
    found = find_tests(model, None, [f"data.path={file}"]).samples.x
    since = (pd.Timestamp("2020-03-31") - pd.Timestamp("1970-01-01")).days
    assert int(found[8, 1]) == since


def test_what_training_did_not_have_is_told_once(mixed, tmp_path, capsys):
    folder, frame, _ = mixed
    new = frame.assign(sex=["x" if k in (7, 30, 31) else "f" for k in range(ROWS)])
    new.loc[12, "seen"] = None
    new.to_csv(tmp_path / "new.csv", index=False)
    arguments = ["predict", folder / "run", tmp_path / "new.csv", "-o", tmp_path / "o.csv"]
    code, _, err = cli(capsys, *arguments, "--chunk", 10)
    assert code == 0, err
    said = " ".join(err.split())
    assert (
        "column 'sex' has a category, unlike all training rows, in 3 rows (first in row 8)" in said
    )
    assert (
        "column 'seen' is empty in 1 row (first in row 13), and the model has no feature for gaps"
        in said
    )
    new.loc[33, "seen"] = "soon"
    new.to_csv(tmp_path / "new.csv", index=False)
    code, _, err = cli(capsys, *arguments, "--chunk", 10, "--overwrite")
    assert code == 2
    assert "column 'seen' has text that is not a date" in " ".join(err.split())
    assert "'soon' in row 34" in " ".join(err.split())


def test_excel_and_parquet_of_any_kind(mixed, tmp_path):
    folder, frame, _ = mixed
    wanted = predict(tmp_path, folder / "run", folder / "t.csv", "wanted.csv")
    frame.to_excel(tmp_path / "t.xlsx", index=False)
    frame.assign(seen=pd.to_datetime(frame.seen)).to_parquet(tmp_path / "t.parquet")
    for name in ("t.xlsx", "t.parquet"):
        found = predict(tmp_path, folder / "run", tmp_path / name, overwrite=True)
        np.testing.assert_allclose(numeric(found), numeric(wanted), atol=1e-6)
        assert found.id.tolist() == wanted.id.tolist()


def test_a_program_serves_encoded_rows(mixed, tmp_path):
    """The `.pt2` takes what `Preprocessing.encode` gives, and says the same of it."""
    folder, frame, run = mixed
    done = export(folder / "run", tmp_path / "m.pt2")
    encoded, _ = run.preprocessing.encode(frame)
    answer = torch.export.load(tmp_path / "m.pt2").module()(torch.from_numpy(encoded))
    wanted = run.trained().expectation(frame)
    torch.testing.assert_close(answer.softmax(-1), wanted, atol=1e-6, rtol=1e-5)
    found = predict(tmp_path, tmp_path / "m.pt2", folder / "t.csv")
    np.testing.assert_allclose(numeric(found), wanted, atol=1e-6)
    card = json.loads(done.cards[0].read_text())
    assert [one["name"] for one in card["inputs"]["columns"]] == list(frame.columns[1:-1])
    assert [one["name"] for one in card["inputs"]["features"]] == list(run.preprocessing.features)
    assert re.search(r"\| sex \| category \| .* \| f, m \|", done.cards[1].read_text())


def test_brackets_in_names_are_shown_as_they_are(tmp_path, capsys, monkeypatch):
    """Neither styles nor their ends, as `[kg]` and `[/b]` would be."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(120, 3)), columns=["dose", "mass [kg]", "[/b] :b:"])
    frame["site"] = np.repeat(["a [/red]", "[bold]b"], 60)
    frame.to_csv("rows.csv", index=False)
    data = {"path": "rows.csv", "label": ["mass [kg]", "[/b] :b:"], "group": "site"}
    fedbayes.run(folder="runs [b]", data=data, rounds=1, model={"hidden": [4]})
    status, told, _ = cli(capsys, "predict", "runs [b]", "rows.csv", "-o", "out [i].csv")
    assert status == 0
    assert told.startswith("wrote out [i].csv: 120 rows, with mean_mass [kg], mean_[/b] :b:, ")
    _, told, _ = cli(capsys, "conformal", "runs [b]")
    assert "wrote runs [b]/calibration.json" in told
    assert "a [/red]" in told
    assert "[bold]b" in told
    model = "runs [b]/model.safetensors"
    _, told, _ = cli(capsys, "evaluate", model, "--run", "runs [b]")
    assert "by runs [b]/model.safetensors" in told
    assert told.count("runs [b]/model.safetensors") == 2
    assert "rmse/[/b] :b:" in told


def test_columns_of_a_parquet_have_types_that_later_pieces_fit(place, classes, patients, tmp_path):
    """In the first piece ages are whole, a feature is empty, and no set has a class."""
    frame = patients.assign(age=patients.age.where(patients.index >= 20, 50))
    frame.loc[:19, "bmi"] = np.nan
    frame.loc[:19, "age"] = 50
    frame["age"] = frame.age.map("{:g}".format)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    model = fedbayes.load(place / "classes")
    model = replace(model, conformal=Conformal(0.1, "probability", (0.5,), 99))
    found = []
    for size in (20, 1000):
        out = tmp_path / f"{size}.parquet"
        fedbayes.predict_file(model, tmp_path / "rows.csv", out, keep_inputs=True, rows=size)
        found.append(pd.read_parquet(out))
    assert not found[0].set[:20].map(len).any()
    assert found[0].set.map(len).any()
    assert (found[0].set.map(list) == found[1].set.map(list)).all()
    assert found[0].age.tolist() == frame.age.astype(float).tolist()
    pd.testing.assert_frame_equal(found[0].drop(columns="set"), found[1].drop(columns="set"))
