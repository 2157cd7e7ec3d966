"""Temperatures from sums of clients, against the optimum of all rows together."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from torch.nn import functional

import fedbayes
from fedbayes.cli import main
from fedbayes.core.metrics import calibrate
from fedbayes.core.seals import sealed_table, unsealed_table
from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError, DataError, FedbayesWarning, RunError
from fedbayes.likelihoods.bernoulli import Bernoulli
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.temperature import (
    GRID,
    LIMIT,
    POINTS,
    TemperatureSums,
    cooled,
    temperature_sums,
)
from fedbayes.reports.result import StoredRun
from fedbayes.runs.build import build_runtime, stored_data, stored_run
from fedbayes.runs.personal import own_models, temperature_of
from fedbayes.storage.calibrations import read_temperature
from fedbayes.workflows.calibrate.calibration import trust
from fedbayes.workflows.calibrate.held_out import divided
from fedbayes.workflows.calibrate.temperature import calibrate_temperature
from fedbayes.workflows.fuse import network_fusing
from fedbayes.workflows.serve import model_evaluation
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.export import export
from fedbayes.workflows.serve.model_files import read_with_card
from tests.helpers.command_line import command


def likelihood_of(classes):
    target = Target("class", tuple("abcdefgh"[:classes]))
    return (Bernoulli if classes == 2 else Categorical)(target=target)


def example(seed, rows, classes, sharp, draws=1):
    """Outputs, and classes drawn from what they say without being so sharp."""
    rng = torch.Generator().manual_seed(seed)
    likelihood = likelihood_of(classes)
    plain = torch.randn(draws, rows, likelihood.outputs, generator=rng).double()
    plain = plain[:1] + 0.3 * plain
    p = likelihood.mean(1.5 * plain)
    return likelihood, sharp * plain, torch.multinomial(p, 1, generator=rng)[:, 0]


def pooled(likelihood, draws, y):
    """The optimum as SciPy finds it on all rows, and the loss."""
    logs = likelihood.log_probabilities(draws.double()).numpy()

    def loss(t):
        return -log_softmax(math.exp(t) * logs, axis=1)[np.arange(len(y)), y].sum()

    end = math.log(LIMIT)
    found = minimize_scalar(loss, bounds=(-end, end), method="bounded", options={"xatol": 1e-10})
    return math.exp(-found.x), loss


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(60, 400),
    st.integers(2, 6),
    st.floats(0.2, 8),
    st.sampled_from([1, 4]),
)
def test_sums_of_clients_give_the_optimum_of_all_rows(seed, rows, classes, sharp, draws):
    likelihood, f, y = example(seed, rows, classes, sharp, draws)
    expected, loss = pooled(likelihood, f, y.numpy())
    owner = torch.arange(rows) % 3
    parts = [temperature_sums(likelihood, f[:, owner == c], y[owner == c]) for c in range(3)]
    whole = parts[0] + parts[1] + parts[2]
    found = whole.temperature()
    assert found == pytest.approx(expected, rel=1e-5)
    assert loss(-math.log(found)) <= loss(-math.log(expected)) + 1e-8
    assert float(whole.nll[7]) == pytest.approx(loss(float(GRID[7])))
    assert whole.rows == rows
    assert len(whole.nll) + len(whole.slope) + len(whole.curvature) + 2 == whole.numbers


@pytest.mark.parametrize("rows", [0, 3, 40])
def test_with_a_prior_every_number_of_rows_has_a_temperature(rows):
    """Also where all are right: log T is normal around 0, of deviation 0.5."""
    likelihood, f, _ = example(3, 50, 4, 2.0)
    f, y = f[:, :rows], f.mean(0)[:rows].argmax(1)
    found = temperature_sums(likelihood, f, y).with_prior()
    _, loss = pooled(likelihood, f, y.numpy())
    best = minimize_scalar(lambda g: (loss(g) if rows else 0) + 2 * g**2, bounds=(-4, 4))
    if rows:
        assert found.temperature() == pytest.approx(math.exp(-best.x), rel=1e-5)
    assert float(found.slope[100]) == pytest.approx(
        float((found.nll[101] - found.nll[99]) / (GRID[101] - GRID[99])), rel=1e-2
    )


def test_slopes_and_curvatures_are_derivatives():
    likelihood, f, y = example(0, 50, 3, 2.0)
    t = torch.tensor(float(GRID[250]), dtype=torch.float64, requires_grad=True)
    logs = likelihood.log_probabilities(f)
    loss = -torch.log_softmax(t.exp() * logs, dim=1).gather(1, y[:, None]).sum()
    (slope,) = torch.autograd.grad(loss, t, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, t)
    found = temperature_sums(likelihood, f, y)
    assert float(found.slope[250]) == pytest.approx(slope.item())
    assert float(found.curvature[250]) == pytest.approx(curvature.item())


def test_no_predictions_and_impossible_classes_are_left_out_and_counted():
    likelihood, f, y = example(1, 200, 3, 3.0)
    clean = temperature_sums(likelihood, f[:, 2:], y[2:])
    f[0, 0] = torch.nan
    f[0, 1, y[1]] = -torch.inf
    found = temperature_sums(likelihood, f, y)
    assert (found.rows, found.left_out) == (198, 2)
    torch.testing.assert_close(found.nll, clean.nll)
    other = (y[2] + 1) % 3
    f[0, 2, other] = -torch.inf  # a class that is ruled out beside the true one is a prediction
    found = temperature_sums(likelihood, f, y)
    assert (found.rows, found.left_out) == (198, 2)
    assert torch.isfinite(torch.stack([found.nll, found.slope, found.curvature])).all()


def test_where_no_temperature_is_the_best():
    likelihood = likelihood_of(3)
    right = torch.eye(3).double()[None]
    for f, y, words in (
        (right, torch.arange(3), "is correct in all 3 counted rows"),
        (right, torch.tensor([1, 2, 0]), "not better than chance"),
        (right[:, :0], torch.arange(0), "no row was counted"),
    ):
        with pytest.raises(DataError, match=words):
            temperature_sums(likelihood, f, y).temperature()


def test_where_almost_all_rows_are_right_new_rows_are_not_much_worse():
    """The model is right in 97 % of rows; one of 134 held-out rows is barely wrong."""
    likelihood, f, _ = example(5, 2000, 4, 2.0)
    first, second = f[0].topk(2, dim=1).indices.T
    y = torch.where(torch.arange(2000) % 33 == 2, second, first)
    held = [k for k in range(200) if k % 33 != 2][:134]
    y[held[0]] = f[0, held[0]].topk(2).indices[1]
    f[0, held[0], y[held[0]]] = f[0, held[0]].max() - 0.05
    sums = temperature_sums(likelihood, f[:, held], y[held])
    _, loss = pooled(likelihood, f[:, 200:], y[200:].numpy())
    plain, cautious = sums.temperature(), sums.with_prior().temperature()
    assert 2 * plain < cautious < 1
    assert loss(-math.log(cautious)) < loss(0.0) < loss(-math.log(plain)) / 5


def test_temperatures_keep_the_order_and_one_changes_nothing():
    logs = torch.log_softmax(torch.randn(9, 4), dim=-1)
    torch.testing.assert_close(cooled(logs, 1.0), logs)
    flat = cooled(logs, 5.0)
    assert torch.equal(flat.argsort(dim=-1), logs.argsort(dim=-1))
    assert (flat.amax(dim=-1) < logs.amax(dim=-1)).all()
    torch.testing.assert_close(flat.exp().sum(dim=-1), torch.ones(9))


def test_sums_of_nobody_are_zeros():
    likelihood, f, y = example(2, 5, 3, 1.0)
    nothing = temperature_sums(likelihood, f[:, :0], y[:0])
    assert isinstance(nothing, TemperatureSums)
    assert nothing.nll.tolist() == [0.0] * POINTS


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Two runs: with a global model that is a posterior, and with clients' own models."""
    found = {}
    for name, method in (("global", "pvi"), ("own", "local")):
        run = fedbayes.run(
            rounds=3,
            data={"clients": 4},
            model={"hidden": [16]},
            method={"name": method},
            calibration="none",
            folder=tmp_path_factory.mktemp("temperature") / name,
        )
        found[name] = run.folder
    return found


@pytest.mark.parametrize("name", ["global", "own"])
def test_the_temperature_of_a_run_is_that_of_its_counted_rows_together(ended, name):
    """Against SciPy on the predictions of all counted rows, put in one place."""
    folder, personal = ended[name], name == "own"
    done = calibrate_temperature(folder.path, personal=personal, share=0.6)
    config = folder.config()
    data = stored_data(config, folder)
    run = stored_run(folder, config, data.preprocessing)
    method = config.build_method()
    models = dict(own_models(folder, method, run)) if personal else {}
    logs, rest = {True: [], False: []}, {True: [], False: []}
    for client in range(data.clients):
        model = models[client] if personal else folder.model()
        x, truth = data.test(client)
        first, others, _ = divided(len(truth), config.seed, client, 0.6)
        assert len(first) == round(0.6 * len(truth))
        assert sorted([*first.tolist(), *others.tolist()]) == list(range(len(truth)))
        for counted, rows in ((True, first), (False, others)):
            with torch.no_grad():
                draws = method.draws(model, run)(x[rows]).double()
            logs[counted].append(run.likelihood.log_probabilities(draws).numpy())
            rest[counted].append(truth[rows].numpy())
    (known, left), (y, z) = (
        [np.concatenate(parts[counted]) for counted in (True, False)] for parts in (logs, rest)
    )

    def loss(t, rows=known, truth=y):
        return -log_softmax(math.exp(t) * rows, axis=1)[np.arange(len(truth)), truth].mean()

    best = minimize_scalar(
        lambda t: len(y) * loss(t) + 2 * t**2,
        bounds=(-4, 4),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert done.temperature == pytest.approx(math.exp(-best.x), rel=1e-5)
    assert (done.counted, done.tested, done.left_out) == (len(y), len(z), 0)
    assert done.before.nll == pytest.approx(loss(0.0, left, z))
    assert done.after.nll == pytest.approx(loss(-math.log(done.temperature), left, z))
    p = np.exp(log_softmax(left / done.temperature, axis=1))
    right = torch.from_numpy(p.argmax(axis=1) == z)
    assert done.after.ece == pytest.approx(
        calibrate(torch.from_numpy(p.max(axis=1)), right).error, abs=1e-9
    )
    assert (
        done.after.accuracy == done.before.accuracy == pytest.approx(float(right.double().mean()))
    )
    assert read_temperature(folder, personal=personal) == done.temperature
    assert read_temperature(folder, personal=not personal) is None
    every = trust(folder.path, personal=personal)
    assert every.temperature == done.temperature
    both, truths = (np.concatenate(parts) for parts in ((known, left), (y, z)))
    assert every.metrics["nll"] == pytest.approx(loss(-math.log(done.temperature), both, truths))
    plain = trust(folder.path, personal=personal, temperature=False)
    assert plain.metrics["nll"] == pytest.approx(loss(0.0, both, truths))


def test_a_temperature_of_another_model_is_not_used(ended, recwarn):
    folder = ended["global"]
    done = calibrate_temperature(folder.path)
    written = json.loads(done.path.read_text())
    known = unsealed_table(done.path.read_bytes())

    def with_changed(**values):
        return known | {"temperature": known["temperature"] | values}

    done.path.write_bytes(sealed_table(with_changed(model="another")))
    with pytest.warns(FedbayesWarning, match="belongs to another model than the run has now"):
        assert read_temperature(folder) is None
    hotter = {"temperature": 2 * done.temperature, "rows": done.counted}
    seal = written.keys() - known.keys()
    changed = [with_changed(all=hotter) | {name: written[name] for name in seal}, known]
    for content in (b"{", b"[]", *(json.dumps(table).encode() for table in changed)):
        done.path.write_bytes(content)
        with pytest.raises(RunError, match=r"cannot read .*: fedbayes calibrate"):
            read_temperature(folder)
    for content in (
        sealed_table(with_changed(all={"temperature": 0.0, "rows": 9})),
        sealed_table({}),
    ):
        done.path.write_bytes(content)
        with pytest.raises(RunError, match="Create it again: fedbayes calibrate"):
            read_temperature(folder)
    done.path.write_bytes(sealed_table(known | {"format": "later"}))
    with pytest.raises(RunError, match="has another version"):
        read_temperature(folder)
    done.path.unlink()
    assert read_temperature(folder) is None


def test_the_command(ended, capsys, monkeypatch):
    def call(*asked):
        monkeypatch.setattr("sys.argv", ["fedbayes", "calibrate", *map(str, asked)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, capsys.readouterr()

    place = ended["global"].path
    status, told = call(place, "--temperature", "--json")
    found = json.loads(told.out)
    assert status == 0
    assert found["after"]["nll"] <= found["before"]["nll"] + 0.05
    assert f"temperature {found['temperature']:.4f}, from" in call(place, "--temperature")[1].out
    curve = json.loads(call(place, "--json")[1].out)
    assert curve["accuracy_at_0.5"] >= curve["accuracy_at_0.9"]
    for asked, words in (
        (["--share", "0.2"], "Add --method temperature or conformal"),
        (["--temperature", "--client", "0"], "--client has no effect with --method temperature"),
        (["--temperature", "--share", "1.5"], "is 1.5. Give a number"),
        (["--temperature", "--personal"], "has no own models of clients"),
    ):
        status, told = call(place, *asked)
        assert status == 2
        assert words in " ".join(told.err.split())
    assert "has no global model" in call(ended["own"].path, "--temperature")[1].err


def test_numbers_have_no_temperature(tmp_path):
    run = fedbayes.run(rounds=1, data={"name": "diabetes", "clients": 2}, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="needs probabilities of classes"):
        calibrate_temperature(run.folder.path)


def test_predictions_are_at_the_temperature(ended, tmp_path, capsys, monkeypatch):
    folder = ended["global"]
    done = calibrate_temperature(folder.path)
    data = stored_data(folder.config(), folder)
    x = data.raw_test(0, 40)
    plain = fedbayes.load(folder.path, temperature=False)
    warm = fedbayes.load(folder.path)
    assert (plain.temperature, warm.temperature) == (None, done.temperature)
    before, after = plain.expectation(x).double(), warm.expectation(x).double()
    by_hand = before ** (1 / done.temperature)
    by_hand /= by_hand.sum(dim=1, keepdim=True)
    torch.testing.assert_close(after, by_hand, rtol=1e-4, atol=1e-6)
    one, two = plain.predict_frame(x), warm.predict_frame(x)
    names = [name for name in one if name.startswith("p_")]
    assert np.allclose(two[names], by_hand.numpy(), atol=1e-6)
    assert (one["predicted"] == two["predicted"]).all()
    assert (one["entropy"] == two["entropy"]).all()
    np.savez(tmp_path / "rows.npz", x=x.numpy())
    asked = ["predict", str(folder.path), str(tmp_path / "rows.npz"), "--overwrite"]
    for more in ([], ["--no-temperature"]):
        asked_now = [*asked, *more, "-o", str(tmp_path / "out.csv")]
        monkeypatch.setattr("sys.argv", ["fedbayes", *asked_now])
        with pytest.raises(SystemExit):
            main()
        told = " ".join(capsys.readouterr().out.split())
        assert (f"at a temperature of {done.temperature:.4g}" in told) == (not more)
    export(folder.path, tmp_path / "model.safetensors")
    alone = fedbayes.load(tmp_path / "model.safetensors")
    assert alone.temperature == done.temperature
    torch.testing.assert_close(alone.expectation(x).double(), after, rtol=1e-4, atol=1e-6)
    assert fedbayes.load(tmp_path / "model.safetensors", temperature=False).temperature is None
    done.path.unlink()


@pytest.mark.parametrize("rows", ["held out", "validation"])
def test_a_client_that_is_alone_has_a_temperature_by_rows_it_does_not_train_on(
    rows, tmp_path, capsys
):
    """In its file, in its export and in predictions, against SciPy; none without such rows."""
    settings = {"method": "local", "rounds": 2, "data": {"clients": 2, "limit": 400}}
    without = fedbayes.run(out=tmp_path / "without", calibration="none", **settings).folder
    if rows == "validation":
        settings |= {"calibration": "none", "data": {**settings["data"], "validation": 0.3}}
    folder = fedbayes.run(out=tmp_path / "run", **settings).folder
    run = StoredRun(folder)
    data = stored_data(run.config, folder)
    runtime = build_runtime(run.config, data, quiet=True)
    kept, found = stored_run(folder, run.config, data.preprocessing), []
    for client, model in own_models(folder, run.config.build_method(), kept):
        trained, held_out = runtime.parts(client)
        x, y = held_out if rows == "held out" else data.test(client)
        share = 0.1 if rows == "held out" else 0.0
        assert len(held_out.y) == round(share * len(data.train(client).y))
        assert len(trained.y) + len(held_out.y) == len(data.train(client).y)
        logits = kept.network(kept.network.prepare(model), x)[None]
        _, loss = pooled(kept.likelihood, logits.detach(), y.numpy())
        best = minimize_scalar(lambda g, of=loss: of(g) + 2 * g**2, bounds=(-3, 3))
        found.append(math.exp(-best.x))
        assert temperature_of(folder, client) == pytest.approx(found[-1], rel=1e-5)
        assert temperature_of(without, client) is None
    files = sorted(folder.clients.glob("*.safetensors"))
    for path, wanted in zip(files, found, strict=True):
        assert read_with_card(path)[1].temperature == pytest.approx(wanted, rel=1e-5)
    assert read_with_card(sorted(without.clients.glob("*.safetensors"))[0])[1].temperature is None
    copied = tmp_path / "copied.safetensors"
    copied.write_bytes(files[0].read_bytes())  # which no run describes
    assert read_with_card(copied)[0].keys() == read_with_card(files[0])[0].keys()
    export(folder, tmp_path / "c.safetensors", client=1)
    x = data.raw_test(0, 4)
    wanted = run.trained(1).predict_proba(x)
    np.testing.assert_allclose(fedbayes.load(tmp_path / "c.safetensors").predict_proba(x), wanted)
    plain = np.log(run.trained(1, temperature=False).predict_proba(x)) / found[1]
    np.testing.assert_allclose(wanted, np.exp(log_softmax(plain, axis=1)), rtol=1e-4)


@pytest.mark.parametrize("apart", [False, True])
def test_evaluate_has_the_teacher_that_fuse_reports(apart, tmp_path, capsys, monkeypatch):
    """Also where no client has two classes, which are compared on synthetic inputs."""
    given = {"clients": 3, "limit": 400}
    folder = fedbayes.run(method="local", rounds=1, data=given, out=tmp_path / "run").folder
    files = sorted(folder.clients.glob("*.safetensors"))
    counts, rows, fused = (tmp_path / name for name in ("c.json", "r.npz", "f.safetensors"))
    table = 30 * np.eye(3, 10) if apart else 5 + np.arange(30).reshape(3, 10)
    counts.write_text(json.dumps(table.astype(int).tolist()))
    data = stored_data(StoredRun(folder).config, folder)
    labels = data.test_union(0, data.test_total).y.numpy()
    np.savez(rows, x=data.raw_test(0, data.test_total).numpy(), y=labels)
    small = ("--set", "draws=256", "--minutes", "0", "--json")
    assert command("fuse", *files, "-o", fused, "--counts", counts, "--test", rows, *small) == 0
    told = json.loads(capsys.readouterr().out)
    marks = {mark["name"]: mark for mark in told["frontier"]}
    asked = ("--run", folder, "--counts", counts, "--json")
    assert command("evaluate", fused, *files, *asked) == 0
    scores = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    learnt = scores["ensemble, as fuse learns it"]
    assert learnt["note"] in told["notes"]
    assert ("its only class" in learnt["note"]) == apart
    for metric in ("accuracy", "nll"):
        assert learnt[metric] == pytest.approx(marks["ensemble"][metric], rel=1e-4)
    monkeypatch.setattr(model_evaluation, "drawn_for", without_inputs)
    assert command("evaluate", fused, *files, *asked) == 0
    found = capsys.readouterr()
    assert (
        "ensemble, as fuse learns it" in [one["name"] for one in json.loads(found.out)]
    ) != apart
    assert ("there is no row 'ensemble, as fuse learns it': no prior" in found.err) == apart


def without_inputs(*_):
    raise ConfigError("no prior fits")


def test_evaluate_and_fuse_have_the_same_teacher(tmp_path, capsys, monkeypatch):
    """Counts of a file, temperatures of clients' files, or those of rows that are given."""
    given = {"clients": 2, "limit": 400, "validation": 0.3}
    folder = fedbayes.run(method="local", rounds=2, data=given, out=tmp_path / "run").folder
    files = sorted(folder.clients.glob("*.safetensors"))
    (tmp_path / "counts.json").write_text(json.dumps([[20] * 10, [30] * 9 + [0]]))
    seen, teach = [], network_fusing.teacher_of
    monkeypatch.setattr(network_fusing, "teacher_of", lambda *a: seen.append(teach(*a)) or seen[-1])
    counts = ("--counts", tmp_path / "counts.json")
    fused = tmp_path / "f.safetensors"
    small = ("--set", "draws=256", "--minutes", "0", "--json")
    assert command("fuse", *files, "-o", fused, *counts, *small) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert command("evaluate", fused, *files, "--run", folder, *counts, "--json") == 0
    scores = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    learnt = scores["ensemble, as fuse learns it"]
    assert learnt["note"] in notes
    assert "temperatures of" in learnt["note"]
    assert "validation samples of the clients" in find_tests(fused, folder, []).what
    data = stored_data(StoredRun(folder).config, folder)
    tests = data.test_union(0, data.test_total)
    log = seen[0][0](tests.x).log_softmax(-1)
    assert learnt["nll"] == pytest.approx(float(functional.nll_loss(log, tests.y)), rel=1e-4)
    # Rows of any client instead: those of a class count as often as the client has the class.
    raw = data.raw_test(0, data.test_total)
    np.savez(tmp_path / "rows.npz", x=raw.numpy(), y=tests.y.numpy())
    rows = ("--temperature-data", tmp_path / "rows.npz")
    assert command("fuse", *files, "-o", fused, *counts, *rows, *small) == 0
    teacher = seen[1][0]
    for client, shares in enumerate(np.array([[20.0] * 10, [30.0] * 9 + [0]])):
        weights = shares[tests.y] / np.bincount(tests.y, minlength=10)[tests.y]
        weights *= (weights > 0).sum() / weights.sum()
        logs = teacher.clients[client](tests.x).double().log_softmax(-1).numpy()

        def loss(g, logs=logs, weights=weights):
            true = log_softmax(math.exp(g) * logs, axis=1)[np.arange(len(logs)), tests.y]
            return -(weights * true).sum() + 2 * g**2

        best = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9})
        assert teacher.temperatures[client] == pytest.approx(math.exp(-best.x), rel=1e-4)
