"""Runs from Python as a new user writes them: words, objects and tables in memory as settings."""

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedbayes
from fedbayes.config.config import Config
from fedbayes.contracts import Method, PointEstimate, Reports, Stateless, Sum, Weights
from fedbayes.core import lazy
from fedbayes.errors import (
    ConfigError,
    DataError,
    FedbayesError,
    FedbayesWarning,
    ModelError,
    RunError,
)
from fedbayes.methods.dsvgd import DsvgdServer
from fedbayes.methods.fedprox import FedProx
from fedbayes.storage.folder import RunFolder
from tests.helpers import toy_functions
from tests.helpers.command_line import command
from tests.helpers.toy_methods import Median

SMALL = {"rounds": 2, "clients": 4, "partition": "iid"}


class Net(nn.Module):
    """As PyTorch's tutorials write one: it knows its own sizes."""

    def __init__(self, hidden=6):
        super().__init__()
        self.first, self.last = nn.Linear(64, hidden), nn.Linear(hidden, 10)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))


def own_method():
    """A class that no module has."""

    class Half(PointEstimate[Weights]):
        name = "half"
        server_state = Weights
        share: float = 0.5

        def init(self, run):
            return Weights(run.network.initial)

        def update(self, server, reports, at):
            mean = reports.mean()
            return Weights(
                {n: w + self.share * (mean[n] - w) for n, w in server.weights.items()}
            ), {}

    return Half


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 80, 240),
            "dose": rng.normal(size=240),
            "sex": rng.choice(["f", "m"], 240),
            "site": np.repeat(["north", "south", "west"], 80),
        }
    )
    frame["sick"] = (frame["dose"] + (frame["sex"] == "m") > 0.5).astype(int)
    return frame


# --- words and shorthands --------------------------------------------------------------------


def test_words_stand_for_tables():
    config = Config.create(method="fedprox", data="digits", model="lenet5", task="categorical")
    whole = Config.create(
        method={"name": "fedprox"},
        data={"name": "digits"},
        model={"name": "lenet5"},
        task={"likelihood": "categorical"},
    )
    assert config == whole
    assert Config.create(data="mine.csv").data.path == Path("mine.csv").absolute()
    assert Config.create(data=Path("digits")).data.path == Path("digits").absolute()
    with pytest.raises(ConfigError, match=r"unknown data set 'mnits' \(did you mean 'mnist'"):
        Config.create(data="mnits")


def test_the_first_line_of_the_issue_runs():
    """Digits have 8 by 8 pixels, which LeNet-5 takes padded."""
    run = fedbayes.run(method="fedavg", data="digits", model="lenet5", rounds=1, clients=2)
    assert run.summary["model"] == "lenet5"
    assert run.summary["clients"] == 2


def test_shorthands_are_the_settings_of_options():
    config = Config.given(
        None,
        {
            **{"clients": 3, "partition": "iid", "lr": 0.2, "epochs": 2, "batch_size": 8},
            **{"optimizer": "adam", "device": "cpu", "likelihood": "categorical"},
        },
    )
    assert (config.data.clients, config.data.partition) == (3, "iid")
    training = config.training
    assert (training.lr, training.epochs, training.batch_size) == (0.2, 2, 8)
    assert (training.optimizer, config.devices) == ("adam", ("cpu",))
    assert config.task["likelihood"] == "categorical"
    with pytest.raises(ConfigError, match=r"lr and training\.lr are the same setting"):
        fedbayes.run(lr=0.1, training={"lr": 0.1})
    with pytest.raises(ConfigError, match="folder and out are the same argument"):
        fedbayes.run(None, "a", out="b")


# --- classes, functions, instances -----------------------------------------------------------


def test_what_a_module_has_goes_by_its_place():
    assert lazy.place_of(Median) == "tests.helpers.toy_methods:Median"
    assert lazy.own("tests.helpers.toy_methods:Median") is Median
    assert Config.create(method=Median).method["name"] == "tests.helpers.toy_methods:Median"
    named = Config.create(method={"name": "fedprox", "proximal": 0.3})
    assert Config.create(method=FedProx(proximal=0.3)) == named
    assert not lazy.in_memory("tests.helpers.toy_methods:Median")
    half = own_method()
    assert lazy.place_of(half) == lazy.place_of(half)
    assert lazy.place_of(own_method()) != lazy.place_of(half)
    assert lazy.own(lazy.place_of(half)) is half
    assert lazy.in_memory(lazy.place_of(lambda: 0))


def test_a_class_or_an_instance_of_a_method_runs_as_its_name_does(tmp_path):
    half = own_method()
    by_class = fedbayes.run(method={"name": half, "share": 1.0}, **SMALL)
    by_instance = fedbayes.run(method=half(share=1.0), **SMALL)
    plain = fedbayes.run(method="fedavg", **SMALL)
    for run in (by_class, by_instance):  # the whole way is FedAvg
        for name, tensor in plain.model.items():
            torch.testing.assert_close(run.model[name], tensor, rtol=1e-5, atol=1e-6)
    assert by_class.summary["method"].startswith("Half")
    assert by_class.config.build_method().share == 1.0


def test_a_network_starts_with_its_weights_and_stays_as_it_is():
    torch.manual_seed(3)
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with fedbayes.Simulation(Config.given(None, {**SMALL, "model": net})) as simulation:
        same(dict(simulation.network.initial), before)
        server = next(iter(simulation)).server
    assert not torch.equal(server.weights["first.weight"], before["first.weight"])
    same(dict(net.state_dict()), before)


def test_a_class_of_networks_is_drawn_by_the_seed():
    """Once with its own sizes, once with those of the data."""

    class Sized(nn.Module):
        def __init__(self, shape, outputs):
            super().__init__()
            self.only = nn.Linear(int(np.prod(shape)), outputs)

        def forward(self, x):
            return self.only(x.flatten(1))

    for kind in (Net, Sized, lambda outputs: nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))):
        one, two = (fedbayes.run(model=kind, seed=1, **SMALL | {"rounds": 1}) for _ in range(2))
        same(one.model, two.model)
    run = fedbayes.run(model={"name": Net, "arguments": {"hidden": 3}}, **SMALL)
    assert run.model["first.weight"].shape == (3, 64)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear, "called as factory"),
        (nn.LazyLinear(10), "lazy layers without shapes"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), "but the likelihood"),
        (nn.Flatten(), "has no trainable weights"),
        (lambda shape: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_a_network_that_will_not_do_is_told(model, words):
    with pytest.raises(ModelError, match=words):
        fedbayes.run(model=model, **SMALL)


@pytest.mark.parametrize("engine", ["workers", "ray"])
def test_other_processes_need_a_file(engine, tmp_path):
    """What a script defines itself is `__main__` to it, and not to its workers."""
    if engine == "ray":
        pytest.importorskip("ray")
    for given in ({"model": Net()}, {"method": own_method()}, {"metrics": [lambda y, p: 0.0]}):
        with pytest.raises(
            ConfigError, match=r"__main__.*Move the class or function to its own file"
        ):
            fedbayes.run(**given, engine=engine, out=tmp_path / "run", **SMALL)
        assert not (tmp_path / "run").exists()


# --- resume ----------------------------------------------------------------------------------


def fresh(*lines):
    """What another process says of the lines, its standard error if it fails."""
    code = "\n".join(("import fedbayes", *lines))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.slow
def test_a_network_in_memory_is_asked_for_again(tmp_path):
    """In another process, and what comes of it is as if it had never stopped."""
    torch.manual_seed(0)
    net, place = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), tmp_path / "run"
    whole = fedbayes.run(model=net, **SMALL | {"rounds": 4})
    fedbayes.run(model=net, out=place, **SMALL)
    said = fresh(
        "from torch import nn",
        "net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))",  # its weights are others
        "try:",
        f"    fedbayes.resume({str(place)!r}, rounds=4)",
        "except fedbayes.errors.ConfigError as error:",
        "    assert 'resume(folder, model=...)' in str(error), error",
        f"run = fedbayes.resume({str(place)!r}, rounds=4, model=net)",
        "print(run.summary['rounds'], run.predict(__import__('torch').zeros(2, 1, 8, 8)).shape)",
    )
    assert said.split() == ["4", "(2,)"], said
    same(fedbayes.Result(place).folder.model(), whole.folder.model())
    with pytest.raises(
        ConfigError, match=r"data.clients of .* is 4, and resume cannot change settings\. Give"
    ):
        fedbayes.resume(place, data={"clients": 3})


def test_names_of_another_process_are_none_of_this_one(tmp_path, monkeypatch):
    """The same name may be another network here: a folder has to be told of its own."""
    place = tmp_path / "run"
    run = fedbayes.run(model=Net(), **SMALL, out=place)
    assert lazy.in_memory(run.config.model.name)
    monkeypatch.setattr("fedbayes.storage.folder._objects", {})
    with pytest.raises(ConfigError, match="Python object of the process that started the run"):
        _ = fedbayes.Result(place).config
    assert command("predict", place, "x.npz", "-o", "y.csv") == 2
    monkeypatch.setattr(lazy, "_held", {})
    with pytest.raises(ConfigError, match="Python object of the process that started the run"):
        Config.create(method="in-memory:Half")


def test_a_run_gets_more_rounds(tmp_path):
    whole = fedbayes.run(**SMALL | {"rounds": 5}, out=tmp_path / "whole")
    fedbayes.run(**SMALL, out=tmp_path / "run")
    text = (tmp_path / "run" / "config.toml").read_text()
    longer = fedbayes.resume(tmp_path / "run", rounds=4)
    assert longer.summary["rounds"] == 4
    assert (tmp_path / "run" / "config.toml").read_text() == text.replace(
        "rounds = 2", "rounds = 4"
    )
    assert command("resume", tmp_path / "run", "--rounds", 5) == 0
    same(fedbayes.Result(tmp_path / "run").model, whole.model)
    for rounds in (5, 3):
        with pytest.raises(RunError, match=f"has had 5 rounds.* not {rounds}"):
            fedbayes.resume(tmp_path / "run", rounds=rounds)
    assert fedbayes.Result(tmp_path / "run").summary["rounds"] == 5


def test_a_run_that_was_stopped_says_why_it_gets_no_rounds(tmp_path):
    run = fedbayes.run(**SMALL | {"rounds": 9}, stop_after=1, lr=1e-9, out=tmp_path / "run")
    assert run.summary["rounds"] < 9
    with pytest.raises(RunError, match="ended by stop_after"):
        fedbayes.resume(tmp_path / "run", rounds=20)


def test_runs_of_several_seeds_get_more_rounds(tmp_path):
    few = {**SMALL, "rounds": 1}
    fedbayes.run_seeds(seeds=2, out=tmp_path / "runs", **few)
    longer = fedbayes.resume_seeds(tmp_path / "runs", rounds=2)
    whole = fedbayes.run_seeds(seeds=2, **SMALL)
    assert longer.summary["metrics"]["global_nll"] == whole.summary["metrics"]["global_nll"]
    assert command("resume", tmp_path / "runs", "--rounds", 3) == 0


# --- tables in memory ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_data_frame_is_as_its_file(table, tmp_path):
    """Bit for bit; and the run folder holds what it needs to be resumed elsewhere."""
    table.to_csv(tmp_path / "table.csv", index=False)
    roles = {"label": "sick", "group": "site"}
    of_file = fedbayes.run(data=tmp_path / "table.csv", rounds=2, **roles)
    run = fedbayes.run(data=table, rounds=2, out=tmp_path / "run", **roles)
    same(run.model, of_file.model)
    assert run.frame("clients").index.tolist() == ["north", "south", "west"]
    copy = tmp_path / "run" / "data.parquet"
    pd.testing.assert_frame_equal(pd.read_parquet(copy), table)
    said = fresh(f"print(fedbayes.resume({str(tmp_path / 'run')!r}, rounds=3).summary['rounds'])")
    assert said == "3\n", said
    os.truncate(copy, 100)
    with pytest.raises(FedbayesError, match=r"data\.parquet"):
        fedbayes.resume(tmp_path / "run", rounds=4)


@pytest.mark.slow
def test_workers_read_the_copy_of_a_data_frame(table, tmp_path):
    roles = {"label": "sick", "group": "site", "rounds": 1}
    one = fedbayes.run(data=table, **roles)
    two = fedbayes.run(data=table, engine="workers", workers=1, out=tmp_path / "run", **roles)
    same(one.model, two.model)


def test_columns_and_index_of_a_data_frame(table):
    numbered = table.set_axis(range(5), axis=1)
    run = fedbayes.run(data=numbered, label=4, group="3", rounds=1)
    assert run.summary["clients"] == 3
    indexed = table.set_index("site")
    assert fedbayes.run(data=indexed, label="sick", group="site", rounds=1).summary["clients"] == 3
    twice = pd.concat([table, table["age"]], axis=1)
    with pytest.raises(DataError, match="has age twice"):
        fedbayes.run(data=twice, label="sick")
    mixed = table.assign(odd=[1, "a"] * 120)
    with pytest.raises(DataError, match=r"cannot be stored.*odd"):
        fedbayes.run(data=mixed, label="sick")
    with pytest.raises(DataError, match="has no rows"):
        fedbayes.run(data=table[:0], label="sick")
    with pytest.raises(DataError, match="no column 'ill'"):
        fedbayes.run(data=table, label="ill")


def test_keep_is_for_a_file_of_any_kind(table, tmp_path):
    table.to_csv(tmp_path / "t.csv.gz", index=False)
    data = {"path": tmp_path / "t.csv.gz", "label": "sick", "keep": True}
    fedbayes.run(data=data, rounds=1, clients=2, partition="iid", out=tmp_path / "run")
    (tmp_path / "t.csv.gz").unlink()
    assert (tmp_path / "run" / "data.csv.gz").exists()
    assert fedbayes.resume(tmp_path / "run", rounds=2).summary["rounds"] == 2
    with pytest.raises(ConfigError, match="keep copies a single file"):
        Config.create(data={"path": tmp_path, "keep": True})


def test_comparisons_of_objects(table, tmp_path):
    half = own_method()
    given = {"data": table, "label": "sick", "group": "site", "rounds": 1, "ood": "none"}
    found = fedbayes.compare(
        ["fedavg", half(share=0.3), half], out=tmp_path / "c", seeds=1, **given
    )
    assert found.tables[0].labels == ["fedavg", "half:share=0.3", "half"]
    again = fedbayes.compare(
        {"all": {"name": half, "share": 1.0}, "fedavg": "fedavg"},
        tmp_path / "d",
        seeds=1,
        **given,
    )
    one, two = (row.figures["global_nll"].mean for row in again.tables[0].rows)
    assert one == pytest.approx(two, rel=1e-5)
    with pytest.raises(ConfigError, match=r"jobs.*cannot import"):
        fedbayes.compare([half], tmp_path / "e", jobs=2, **given)
    with pytest.raises(ConfigError, match="foreign and ood are the same argument"):
        fedbayes.compare("fedavg", foreign="none", ood="none")


# --- estimators ------------------------------------------------------------------------------


def test_estimators_take_objects_and_are_pickled(table):
    x, y = table[["age", "dose"]], table["sick"]
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    given = {"rounds": 2, "random_state": 0}
    model = fedbayes.FederatedClassifier(own_method()(share=1.0), model=net, **given).fit(x, y)
    plain = fedbayes.FederatedClassifier(model=net, **given).fit(x, y)
    np.testing.assert_allclose(model.predict_proba(x), plain.predict_proba(x), rtol=1e-5)
    loaded = pickle.loads(pickle.dumps(plain))
    np.testing.assert_array_equal(loaded.predict_proba(x), plain.predict_proba(x))
    half = fedbayes.FederatedClassifier(client_fraction=0.4, **given).fit(x, y)
    assert half.config_.cohort_size(5) == 2
    number = fedbayes.FederatedClassifier(clients_per_round=3, **given).fit(x, y)
    assert number.config_.cohort_size(5) == 3
    assert "model__hidden" in fedbayes.FederatedClassifier(model={"hidden": [3]}).get_params()


# --- functions of one's own ------------------------------------------------------------------

PLACE = "tests.helpers.toy_functions"


def test_an_own_sampling_chooses_the_clients(tmp_path):
    given = {"sampling": toy_functions.alternating, "clients_per_round": 2, **SMALL, "rounds": 3}
    run = fedbayes.run(**given, out=tmp_path / "run")
    assert run.config.sampling == f"{PLACE}:alternating"
    with fedbayes.Simulation(run.config) as simulation:
        cohorts = [simulation.cohort_of(number) for number in (1, 2, 3)]
    assert cohorts == [[1, 3], [0, 2], [1, 3]]
    assert [line["cohort"] for line in run.metrics] == [2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling": f"{PLACE}:too_many"}, "returned 5 clients, where size is 4"),
        ({"sampling": f"{PLACE}:twice"}, "returned a client twice in round 1"),
        ({"sampling": f"{PLACE}:fails"}, r"KeyError: 'nobody' \(toy_functions.py, line"),
        ({"sampling": f"{PLACE}:lacking"}, "cannot find the sampling"),
        ({"sampling": "math:pi"}, "is a float. Give a function"),
        (
            {
                "sampling": f"{PLACE}:alternating",
                "privacy": {"noise": 1.0, "repeatable": True},
                "aggregation": {"clip": 1.0},
            },
            "privacy.noise needs randomly sampled cohorts, but sampling",
        ),
        ({"training": {"optimizer": f"{PLACE}:nothing"}}, "NoneType, which has no step"),
        ({"training": {"optimizer": "torch.optim:LBFGS"}}, "took no step.*closure"),
        ({"training": {"optimizer": "torch.optim:Nadam"}}, "no attribute 'Nadam'"),
        ({"metrics": [f"{PLACE}:words"]}, "returned a str. Return one number"),
        ({"metrics": [f"{PLACE}:fails"]}, "failed, called as function"),
        ({"sampling": "unifrom"}, "did you mean 'uniform'.*package.module:name"),
    ],
)
def test_an_own_function_that_will_not_do_is_told(settings, words, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        fedbayes.run(**settings, **SMALL)


def test_an_own_partition_divides_the_rows():
    run = fedbayes.run(partition=toy_functions.in_blocks, clients=5, rounds=1)
    division = run.folder.partition()
    rows = [
        np.sort(np.concatenate([division.train_rows(c), division.test_rows(c)])) for c in range(5)
    ]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(1794))  # of 1,797
    with pytest.raises(DataError, match=r"assigned a row to client 5\. data\.clients is 5"):
        fedbayes.run(partition=f"{PLACE}:outside", clients=5, rounds=1)


def test_own_metrics_are_those_that_they_compute():
    run = fedbayes.run(metrics=[toy_functions.right, "brier"], **SMALL)
    name = f"{PLACE}:right"
    for line in run.metrics:
        assert line["metrics"]["global"][name] == pytest.approx(line["global_accuracy"])
        assert line["metrics"]["local"][name] == pytest.approx(line["local_accuracy"])
    worst = run.summary["metrics"]["global_worst"]
    assert worst[name] == pytest.approx(worst["accuracy"])
    run = fedbayes.run(data="diabetes", metrics=[f"{PLACE}:absolute", "crps"], **SMALL)
    found = run.summary["metrics"]["global"]
    assert found[f"{PLACE}:absolute"] == pytest.approx(found["mae"], rel=1e-5)
    assert found["crps"] < found["mae"]


def test_an_own_optimizer_steps():
    plain = fedbayes.run(**SMALL)
    for optimizer in (toy_functions.sgd, torch.optim.SGD, "torch.optim:SGD"):
        same(
            fedbayes.run(optimizer=optimizer, lr=plain.config.training.lr, **SMALL).model,
            plain.model,
        )


# --- how many clients are in a round ---------------------------------------------------------


def test_clients_per_round_and_client_fraction():
    assert Config.create(clients_per_round=1).cohort_size(50) == 1
    assert Config.create(client_fraction=1).cohort_size(50) == 50
    assert Config.create(client_fraction=0.1).cohort_size(50) == 5
    assert Config.create().cohort_size(50) == 50
    for cohort in (3, 0.3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config = Config.create(cohort=cohort)
            assert config.cohort == cohort
            assert Config.create(**config.model_dump()) == config
    with pytest.warns(FedbayesWarning, match="means one client a round. Give clients_per_round"):
        assert Config.create(cohort=1).clients_per_round == 1
    with pytest.warns(FedbayesWarning, match="means all clients in every round. Give client_fract"):
        assert Config.create(cohort=1.0).client_fraction == 1.0
    for pair in (
        {"cohort": 2, "clients_per_round": 2},
        {"clients_per_round": 2, "client_fraction": 0.5},
    ):
        with pytest.raises(ConfigError, match="both set the number of clients per round"):
            Config.create(**pair)
    for settings in (
        {"clients_per_round": 0},
        {"client_fraction": 1.5},
        {"clients_per_round": 0.5},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            Config.create(**settings)


def test_an_override_takes_the_place_of_what_a_file_says(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("cohort = 0.5\n")
    assert Config.load(file, ["clients_per_round=3"]).cohort_size(10) == 3
    assert Config.load(file, ["cohort=4"]).cohort_size(10) == 4
    with pytest.raises(ConfigError, match="cohort and client_fraction both set"):
        Config.load(file, ["cohort=4", "client_fraction=0.5"])


def test_an_older_config_says_nothing_of_its_cohort(tmp_path):
    """Every stored config of older versions has `cohort = 1.0`."""
    file = tmp_path / "config.toml"
    file.write_text("cohort = 1.0\nrounds = 3\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.stored(file).client_fraction == 1.0


# --- options ---------------------------------------------------------------------------------


def test_options_of_run_are_shorthands(tmp_path, capsys):
    given = ["--lr", 0.3, "--epochs", 2, "--batch-size", 16, "--optimizer", "adam"]
    given += ["--device", "cpu", "--rounds", 1, "--clients-per-round", 2, "--clients", 4]
    assert command("run", *given, "-o", tmp_path / "run") == 0
    config = RunFolder(tmp_path / "run").config()
    training = config.training
    assert (training.lr, training.epochs, training.batch_size) == (0.3, 2, 16)
    assert (training.optimizer, config.devices, config.clients_per_round) == ("adam", ("cpu",), 2)
    capsys.readouterr()
    for option, setting in (
        (("--lr", 0.1), "training.lr=0.2"),
        (("--device", "cpu"), "device=cpu"),
        (("--rounds", 2), "rounds=2"),
    ):
        assert command("run", *option, "--set", setting) == 2
        assert f"{option[0]} and --set {setting} both set" in capsys.readouterr().err
    assert command("run", "--client-fraction", 0.5, "--clients-per-round", 2) == 2
    assert "both set the number of clients" in capsys.readouterr().err


# --- the contract of a method ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Field name")
@pytest.mark.parametrize("name", ["chart", "loss", "local", "check", "model", "update", "accept"])
def test_a_parameter_in_the_place_of_the_contract_is_refused(name):
    with pytest.raises(ConfigError, match=f"Odd has a parameter '{name}'.*rename"):
        type("Odd", (PointEstimate[Weights],), {"__annotations__": {name: float}, name: 0.5})


@pytest.mark.filterwarnings("ignore:Field name")
@pytest.mark.parametrize("name", ["name", "about", "reports"])
def test_an_attribute_with_a_type_is_no_parameter(name):
    with pytest.raises(
        ConfigError, match=f"'{name}', and methods have an attribute.*without a type"
    ):
        type("Odd", (PointEstimate[Weights],), {"__annotations__": {name: str}, name: "odd"})


def test_a_parameter_may_be_changed_by_a_derived_class():
    class Uniform(own_method()):
        share: float = 0.9
        weighting: str = "uniform"

    assert Uniform().share == 0.9
    assert not Reports.of(Uniform()).weighted


def test_what_a_class_lacks_is_told():
    class Nameless(PointEstimate[Weights]):
        server_state = Weights

    class Typeless(own_method()):
        server_state = None

    class Unfinished(Method[Weights, Stateless, Sum]):
        name = "unfinished"
        server_state = Weights

    class Longer(PointEstimate[DsvgdServer]):
        name, server_state = "longer", DsvgdServer

    for kind, words in (
        (Nameless, "Nameless has no name. Write name = 'nameless' into the class"),
        (Typeless, r"Typeless has no server_state\. Write server_state = Weights"),
        (Unfinished, r"Unfinished lacks update\. Define"),
        (Longer, r"state DsvgdServer of longer has more than weights\. Define init and update"),
        (Net, "derived from fedbayes.contracts.Method"),
    ):
        with pytest.raises(ConfigError, match=words):
            fedbayes.run(method=kind, **SMALL)


def test_what_functions_of_a_method_return_is_looked_at():
    half = own_method()

    class Alone(half):
        def update(self, server, reports, at):
            return server

    class Swapped(half):
        def update(self, server, reports, at):
            return {}, server

    class Wider(half):
        def update(self, server, reports, at):
            return Weights({n: t.double() for n, t in server.weights.items()}), {}

    class Fewer(half):
        def update(self, server, reports, at):
            return Weights(dict(list(server.weights.items())[:-1])), {}

    class Pair(half):
        def report(self, solved, problem, client, at):
            return super().report(solved, problem, client, at)[:2]

    class Nothing(half):
        def local(self, message, client, samples, at):
            return None

    class Started(half):
        def init(self, run):
            return dict(run.network.initial)

    for kind, words in (
        (Alone, r"update of the method half returned a Weights. Return .*\(Weights\), metrics"),
        (Swapped, "update of the method half returned a dict for the server's state"),
        (Wider, r"gives the weight '.*' as torch.float64, and it was torch.float32\. Convert"),
        (Fewer, "update of half gives no weight .* Return all"),
        (Pair, "report of the method half returned a tuple of 2. Return a Report"),
        (Nothing, "local of the method half returned a NoneType"),
        (Started, "init of the method half returned a dict"),
    ):
        with pytest.raises(ConfigError, match=words):
            fedbayes.run(method=kind, **SMALL)


def test_param_groups_of_all_parameters():
    """`""` begins every name; the longest beginning counts."""
    from dataclasses import replace
    from functools import partial

    half = own_method()

    class Slow(half):
        def problem(self, message, client, samples, at):
            problem = super().problem(message, client, samples, at)
            still, moving = partial(torch.optim.SGD, lr=0.0), partial(torch.optim.SGD, lr=0.1)
            return replace(problem, param_groups={"": still, "last": moving})

    class Wrong(half):
        def problem(self, message, client, samples, at):
            problem = super().problem(message, client, samples, at)
            return replace(problem, param_groups={"lst": torch.optim.SGD})

    torch.manual_seed(0)
    net = Net()
    run = fedbayes.run(method=Slow, model=net, **SMALL)
    moved = {n: not torch.equal(run.model[n], t) for n, t in net.state_dict().items()}
    assert moved == {
        "first.weight": False, "first.bias": False, "last.weight": True, "last.bias": True
    }  # fmt: skip
    with pytest.raises(ConfigError, match="param_groups lists 'lst', but no parameter begins with"):
        fedbayes.run(method=Wrong, model=net, **SMALL)


# --- how things show themselves --------------------------------------------------------------


def test_the_folder_of_a_result_is_a_path(tmp_path):
    run = fedbayes.run(**SMALL, out=tmp_path / "run")
    folder = run.folder
    assert os.fspath(folder) == str(folder) == str(tmp_path / "run")
    assert Path(folder) == tmp_path / "run" == folder
    assert (folder / "config.toml").exists()
    assert (folder.name, folder.parent, folder.exists()) == ("run", tmp_path, True)
    assert sorted(path.name for path in folder.iterdir())[0] == ".lock"
    assert len(os.listdir(folder)) > 5  # noqa: PTH208
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        folder.nothing  # noqa: B018


def public_objects(table, place):
    """Of every class that Python users get something of."""
    run = fedbayes.run(data=table, label="sick", group="site", rounds=1)
    with fedbayes.Simulation(Config.given(None, SMALL)) as simulation:
        step = next(iter(simulation))
        report = simulation.method.report
        yield from (simulation, step, simulation.run, simulation.data, simulation.network)
        yield from (simulation.data.dataset, simulation.data.partition, simulation.config.data)
        assert callable(report)
    yield from (run, run.config, run.trained(), run.preprocessing)
    sites = {name: rows.drop(columns="site") for name, rows in table.groupby("site")}
    some = {name: rows.assign(time=np.arange(1.0, len(rows) + 1)) for name, rows in sites.items()}
    yield fedbayes.glm(sites, "dose", ["age", "sex"])
    yield fedbayes.cox(some, "time", "sick", ["age"])
    yield (curves := fedbayes.kaplan_meier(some, "time", "sick"))
    yield next(iter(curves.curves.values()))
    yield fedbayes.meta_analysis(sites, "dose", ["age"])
    networks = [nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 5)) for _ in range(3)]
    yield fedbayes.fuse([network.state_dict() for network in networks])
    yield fedbayes.fuse(networks, method="average", shape=(9,))
    yield fedbayes.compare("fedavg,fedprox", place, seeds=1, **SMALL)
    yield fedbayes.run_seeds(seeds=1, **SMALL)
    yield fedbayes.FederatedClassifier("fedprox", model={"hidden": [5]})
    table.to_csv(place.with_suffix(".csv"), index=False)
    yield fedbayes.client_tables(place.with_suffix(".csv"), group="site")


def test_every_public_object_is_shown_in_a_few_words(table, tmp_path):
    seen = set()
    for one in public_objects(table, tmp_path / "compared"):
        text, html = repr(one), one._repr_html_()
        assert len(text) <= 400, text
        assert text.count("\n") <= 2, text
        assert " at 0x" not in text
        assert html.startswith(("<div", "<style"))
        assert len(html) < 60_000 if "sk-" in html else len(html) < 8_000
        seen.add(type(one).__name__)
    named = {name for name in fedbayes.__all__ if name[0].isupper()} - {"FederatedRegressor"}
    assert named <= seen


def test_what_is_shown_is_what_is_there(tmp_path):
    config = Config.given(None, {"method": "fedprox", "lr": 0.2, "rounds": 3})
    assert repr(config).startswith("Config(rounds=3, training=LocalTraining(lr=0.2), method=")
    found = fedbayes.compare("fedavg,fedprox", tmp_path / "c", seeds=1, **SMALL)
    html = found._repr_html_()
    assert f"{found.tables[0].rows[0].figures['global_accuracy'].mean:.4f}" in html
    assert "fedavg, fedprox" in repr(found)
    seeds = fedbayes.run_seeds(seeds=2, **SMALL)
    assert f"{seeds.summary['metrics']['global_accuracy']['std']:.4f}" in seeds._repr_html_()
