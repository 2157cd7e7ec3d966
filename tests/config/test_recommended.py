"""Settings at `auto`: chosen before the first round, stored, and overridden by what is set."""

import math
import warnings

import pytest

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.contracts import About, Known, PointEstimate, Weights
from fedbayes.errors import ConfigError
from fedbayes.inference.settings import LocalTraining
from fedbayes.methods import METHODS
from fedbayes.methods.ivon_admm import IvonAdmm
from tests.helpers.command_line import command

pytestmark = pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
SMALL = {"data": {"name": "digits", "clients": 4, "limit": 200}, "rounds": 2}


def started(**settings):
    """The settings of a run as they are before its first round."""
    with Simulation(Config.create(**{**SMALL, **settings})) as simulation:
        return simulation.config


class Wrong(PointEstimate[Weights]):
    """Recommends what is no setting."""

    name = "wrong"
    about = About("recommends what is no setting")
    server_state = Weights

    def init(self, run):
        return Weights(run.network.initial)

    def update(self, server, reports, at):
        return Weights(reports.mean()), {}

    def recommended(self, known):
        return {"training.learning_rate": 1.0}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_left_open_and_what_was_chosen_is_known(name):
    config = started(method={"name": name})
    assert not config.training.open
    method = config.build_method()
    assert all(getattr(method, key) is None for key in method.open)  # TOML has no null
    for key, value in config.settings_chosen.items():
        table, _, setting = key.partition(".")
        held = config.training.model_dump() if table == "training" else config.method
        assert held[setting] == value
    told = {"training.optimizer", "training.lr", "training.epochs"} & set(config.settings_chosen)
    assert len(told) == 3
    assert config.reopened().training == Config.create(**SMALL).training


@pytest.mark.parametrize("name", METHODS)
def test_published_settings_are_the_defaults_of_the_class(name):
    config = started(method={"name": name, "preset": "published"})
    assert config.training == LocalTraining()
    made = METHODS[name](preset="published", **METHODS[name].about.published)
    for key in made.choosable():
        assert getattr(config.build_method(), key) == getattr(made, key)


def test_what_is_set_stays():
    given = {"lr": 0.01, "epochs": 1}
    config = started(method={"name": "pvi", "kl_weight": 0.5}, training=given)
    assert (config.training.lr, config.training.epochs) == (0.01, 1)
    assert config.method["kl_weight"] == 0.5
    assert config.settings_chosen == {
        **{"training.optimizer": "adam", "method.prior_std": 1.0},
        "method.damping": 0.29,  # in two rounds half of a change: 1 - 0.5 ** (1 / 2)
    }
    longer = started(method={"name": "pvi"}, rounds=20)
    assert "method.damping" not in longer.settings_chosen  # a quarter a round is enough


@pytest.mark.parametrize(
    "given",
    [
        {"kl_weight": 0.01},
        {"rho": 0.5, "kl_weight": 0.1},
        {"start_std": 0.1},
        {"rate": 0.0},
        {"rate": 0.0, "prior_std": 0.1},
        {"rate": 0.0, "kl_weight": 1.0},
    ],
)
def test_first_steps_of_bayesian_admm_are_as_long_whatever_else_is_set(given):
    """Their length is lr n s²/(kl_weight ρ); rates have one digit."""
    lengths = []
    for settings in ({}, given):
        config = started(method={"name": "ivon-admm", **settings})
        method = config.build_method()
        std = method.prior_std if method.fixed_precision else method.start_std
        rho = method.rho or 1 / SMALL["data"]["clients"]
        lengths.append(config.training.lr * std**2 / (method.kl_weight * rho))
    assert lengths[1] == pytest.approx(lengths[0], rel=0.6)


@pytest.mark.parametrize("name", ["ivon-admm", "fedivon"])
def test_an_optimizer_without_effect_changes_no_rate_and_is_not_told(name, tmp_path, capsys):
    usual = started(method={"name": name}).training.lr
    for training in ({"optimizer": "adam"}, {"momentum": 0.9}):
        config = started(method={"name": name}, training=training)
        assert config.training.lr == usual
    asked = ("--rounds", "1", "--set", "data.limit=200", "--out", tmp_path / "run")
    assert command("run", "--method", name, *asked) == 0
    told = capsys.readouterr()
    told = " ".join((told.out + told.err).split())
    assert "recommended settings: training.lr = " in told
    assert "training.optimizer" not in told


def test_bayesian_admm_learns_with_precisions_that_stay(tmp_path):
    """By default, as with a rate; and its first steps for a pretrained network are as long."""
    method, data = {"name": "ivon-admm", "rate": 0.0}, {"name": "digits"}
    run = fedbayes.run(rounds=3, data=data, method=method, folder=tmp_path / "run")
    assert run.summary["global_accuracy"] > 0.8
    chosen = run.summary["settings_chosen"]
    assert (chosen["method.prior_std"], chosen["method.kl_weight"]) == (0.03, 0.0009)
    with Simulation(Config.create(rounds=1, data=data)) as simulation:
        known = Known(simulation.run, samples=100, median=50, pretrained=True)
    assert IvonAdmm().recommended(known)["training.lr"] == 0.01
    assert IvonAdmm(kl_weight=0.1).recommended(known)["training.lr"] == 0.001


DEEP, CNN = {"hidden": [8, 6, 8]}, {"name": "lenet5"}


@pytest.mark.parametrize(
    ("name", "model", "rate"),
    [
        ("fedavg", {"hidden": [8]}, 0.2),
        ("fedavg", DEEP, 0.2),
        ("fedavg", CNN, 0.1),
        ("pvi", {"hidden": [8]}, 0.01),
        *(("pvi", model, 0.002) for model in (DEEP, CNN)),
        ("pfedbayes", DEEP, 0.002),
        ("fedlap", DEEP, 0.003),
        ("gpi-fnm", DEEP, 0.01),
    ],
)
def test_steps_are_shorter_on_convolutions_and_on_drawn_weights_of_deep_networks(name, model, rate):
    assert started(method={"name": name}, model=model).training.lr == pytest.approx(rate)


def test_bayesian_admm_starts_as_wide_as_the_narrowest_layer():
    """Uniform weights have the standard deviation (3 · fan-in)^-½."""
    narrow = started(method={"name": "ivon-admm"}, model={"hidden": [400, 300, 8]})
    assert narrow.method["start_std"] == pytest.approx(0.03)  # (3 · 400)^-½ = 0.029
    wide = started(method={"name": "ivon-admm"}, model=DEEP)
    assert wide.method["start_std"] == 0.05
    set_ = started(method={"name": "ivon-admm", "start_std": 0.01}, model=DEEP)
    assert set_.method["start_std"] == 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "pvi", "ivon-admm", "virtual"])
@pytest.mark.parametrize("model", [{"hidden": [200] * 3}, CNN], ids=["dense", "convolutions"])
def test_a_first_run_of_a_deep_network_learns(name, model):
    chosen = {"method": {"name": name}, "model": model, "evaluate_every": 0, "progress": False}
    summary = fedbayes.run(**chosen, seed=7).summary
    assert summary["global_accuracy"] > 0.9


@pytest.mark.parametrize(("given", "rate"), [("sgd", 0.1), ("adamax", 0.006)])
def test_a_rate_goes_with_the_optimizer_that_is_set(given, rate):
    config = started(method={"name": "pvi"}, training={"optimizer": given})
    assert config.training.lr == rate


def test_steps_and_momentum_exclude_what_does_not_go_with_them():
    config = started(method={"name": "combined"}, training={"steps": 3, "momentum": 0.5})
    assert (config.training.optimizer, config.training.patience) == ("sgd", None)


def test_a_copy_made_from_a_dump_leaves_open_what_was_open():
    config = Config.create(method={"name": "pvi"}, training={"lr": 0.01})
    again = Config.create(**config.model_dump())
    assert again.training.open == config.training.open == ("optimizer", "epochs", "patience")
    assert again.method["kl_weight"] == "auto"


def test_a_run_stores_what_was_chosen_and_resumes_with_it(tmp_path):
    config = Config.create(**SMALL, method={"name": "pvi"})
    with Simulation(config, tmp_path / "run") as simulation:
        for _ in simulation:
            break
        chosen = simulation.config.settings_chosen
    stored = Config.load(tmp_path / "run" / "config.toml")
    assert stored.settings_chosen == chosen
    assert stored.build_method().kl_weight == chosen["method.kl_weight"]
    again = stored.reopened()
    assert (again.training, again.method) == (config.training, config.method)
    assert not again.settings_chosen
    result = fedbayes.resume(tmp_path / "run")
    assert result.summary["settings_chosen"] == chosen
    assert result.summary["rounds"] == 2


def test_settings_changed_since_are_not_reopened():
    config = started(method={"name": "pvi"})
    changed = Config.create(**{**config.model_dump(), "training": {"lr": 0.5}})
    assert changed.reopened().training.lr == 0.5
    assert changed.reopened().method["kl_weight"] == "auto"


def test_a_recommendation_that_is_no_setting_is_an_error():
    with pytest.raises(ConfigError, match=r"recommends training\.learning_rate, which a run"):
        started(method={"name": f"{__name__}:Wrong"})


def test_auto_is_for_settings_that_are_chosen_alone():
    with pytest.raises(ConfigError, match="batch_size"):
        Config.create(training={"batch_size": "auto"})


def test_the_kl_weight_follows_samples_weights_and_what_the_server_hears():
    """share · N h / P: h = 1 - (1 - 1/B)^(T B / K) is what a damped factor comes to."""
    settings = {"method": {"name": "pvi"}, "rounds": 2, "cohort": 2}
    with Simulation(Config.create(**{**SMALL, **settings})) as simulation:
        run, samples = simulation.run, int(simulation.data.train_sizes().sum())
        heard = 1 / 2  # a client is in one round, and of two clients
        weights = 64 * 100 + 100 + 100 * 10 + 10
        known = Known(run, samples, 50)
        assert known.weights == weights
        assert known.tempered(0.2) == float(f"{0.2 * samples * heard / weights:.1g}")
        assert known.tempered(1e9) == 1.0
        assert simulation.method.kl_weight == known.tempered(0.2)


@pytest.mark.parametrize(("median", "epochs"), [(10, 20), (50, 10), (130, 4), (5000, 2)])
def test_small_clients_take_more_epochs(median, epochs):
    with Simulation(Config.create(**SMALL)) as simulation:
        known = Known(simulation.run, 4 * median, median)
    assert known.epochs(20) == epochs
    steps = epochs * math.ceil(median / 32)
    assert steps >= 20 or epochs == 20


def test_gates_are_on_the_papers_scale_where_the_price_is_the_papers():
    assert started(method={"name": "fedsparse"}).method["scale"] == "logits"
    for own in ({"l0": "high"}, {"scale": "paper"}, {"gates": "weights"}):
        config = started(method={"name": "fedsparse", **own})
        assert config.method["scale"] == "paper"
        assert config.method["l0"] == own.get("l0", "mid")


@pytest.mark.slow
def test_fedsparse_prunes_in_a_first_run():
    summary = fedbayes.run(method="fedsparse", seed=7, evaluate_every=0, progress=False).summary
    assert 0.1 < summary["sparsity"] < 0.9


@pytest.mark.parametrize(
    "name",
    ["pvi", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedsparse", "gpi-fnm", "fedlap"))],
)
def test_a_first_run_learns(name):
    summary = fedbayes.run(method={"name": name}, seed=7, evaluate_every=0, progress=False).summary
    assert summary["global_accuracy"] >= 0.94
    assert summary["global_nll"] <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in METHODS if name not in ("local", "global", "fedpm")),
        pytest.param(
            "fedpm",
            marks=pytest.mark.xfail(strict=True, reason="0.935: masks need wide networks"),
        ),
    ],
)
def test_a_first_run_reaches_its_targets(name, tmp_path):
    """Of digits, as `benchmarks/first_try.py` prints them."""
    from benchmarks import first_try

    found = [first_try.measured("digits", name, seed, tmp_path) for seed in first_try.SEEDS]
    assert not first_try.failed("digits", name, first_try.average(found), 0.0)


@pytest.mark.parametrize("name", ["pvi", "virtual", "fedlap", "ivon-admm", "fedfuse"])
def test_a_run_says_where_a_method_falls_short_of_averaging(name):
    """In the case of 100 clients, and not where all of ten take part."""
    data = {"name": "digits", "partition": "iid", "limit": 600}
    for clients, said in ((100, True), (10, False)):
        config = Config.create(
            data={**data, "clients": clients},
            clients_per_round=10,
            rounds=20,
            method={"name": name},
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Simulation(config):
                pass
        told = " ".join(str(one.message) for one in caught)
        assert ("of 100 clients" in told or "rounds on average" in told) == said
