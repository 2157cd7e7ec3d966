"""In which precision a run computes where the config leaves it to be found."""

import json

import pytest

from fedbayes import Config, Simulation
from fedbayes.errors import FedbayesWarning
from fedbayes.runs import precision
from fedbayes.workflows.experiments.seed_runs import SeedRuns

LARGE = {"rounds": 1, "data": {"name": "digits", "clients": 2, "limit": 60}}
LARGE |= {"model": {"hidden": [300, 200]}, "deterministic": False}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with units for bf16, on which a step takes so much of float32's time."""
    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "has_units", lambda device: True)
    asked = []

    def begin(share):
        def measured(config, run, data):
            asked.append(config)
            return share

        monkeypatch.setattr(precision, "_measured", measured)
        return asked

    return begin


def test_by_default_it_is_float32_and_nothing_is_measured(machine, tmp_path):
    """Whatever the machine: the same config has the same numbers."""
    asked = machine(0.1)
    config = Config.create(**LARGE | {"deterministic": True})
    assert config.precision == "auto"
    with Simulation(config, tmp_path / "run") as simulation:
        list(simulation)
        assert simulation.network.precision == simulation.config.precision == "float32"
        assert simulation.summary()["precision"] == "float32"
    assert Config.stored(tmp_path / "run" / "config.toml").precision == "float32"
    assert asked == []


@pytest.mark.parametrize(("share", "wanted"), [(0.5, "bf16"), (0.9, "float32")])
@pytest.mark.filterwarnings("ignore:deterministic has no effect")
def test_without_determinism_it_is_what_is_clearly_faster(machine, share, wanted, tmp_path):
    """Measured once; stored; and a run goes on with it where the measure is another one."""
    asked, config = machine(share), Config.create(**LARGE)
    for number in range(2):
        place = tmp_path / f"{number}"
        if wanted == "bf16":
            with pytest.warns(FedbayesWarning, match=f"auto' chose bf16: .* takes {share:.2f}"):
                simulation = Simulation(config, place)
        else:
            simulation = Simulation(config, place)
        with simulation:
            list(simulation)
            assert simulation.network.precision == simulation.config.precision == wanted
            assert simulation.summary()["precision"] == wanted
        assert Config.stored(place / "config.toml").precision == wanted
    assert len(asked) == 1
    (kept,) = json.loads((tmp_path / "cache" / "precision.json").read_text()).values()
    assert kept == share
    (tmp_path / "cache" / "precision.json").write_text("{]")  # then it is measured again
    machine(1.4 - share)
    with Simulation(None, tmp_path / "0") as again:
        assert again.network.precision == wanted
    with Simulation(config, tmp_path / "other") as other:
        assert other.network.precision != wanted


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"hidden": [8]}},
        {"method": {"name": "pvi"}},
        {"method": {"name": "virtual"}},
        {"method": {"name": "ivon-admm"}},
        {"precision": "float32"},
    ],
)
def test_small_networks_and_methods_that_need_float32_have_it(machine, settings):
    asked = machine(0.1)
    with Simulation(Config.create(**LARGE | settings)) as simulation:
        assert simulation.network.precision == simulation.config.precision == "float32"
    assert asked == []


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_steps_are_timed_and_leave_everything_as_it_was(monkeypatch):
    monkeypatch.setattr(precision, "_SECONDS", 0.05)
    with Simulation(Config.create(**LARGE)) as simulation:
        before = simulation.network.initial["1.weight"].clone()
        share = precision._measured(simulation.config, simulation.run, simulation.data)
        assert 0.01 < share < 100
        assert simulation.network.precision == "float32"
        assert (simulation.network.initial["1.weight"] == before).all()


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_runs_of_several_seeds_go_on_with_what_was_found(machine, tmp_path):
    machine(0.5)
    runs = SeedRuns(Config.create(**LARGE), 2, tmp_path / "runs")
    with runs.open(0) as simulation:
        list(simulation)
    machine(2.0)
    again = SeedRuns(Config.create(**LARGE), 2, tmp_path / "runs")
    assert again.missing == [1]
    with again.open(0) as simulation:
        assert simulation.network.precision == "bf16"
