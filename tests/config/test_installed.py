"""What other packages offer by entry points is found by its name."""

from importlib.metadata import EntryPoint

import pytest

import fedbayes
from fedbayes import Config
from fedbayes.config.config import find_method
from fedbayes.core import lazy
from fedbayes.errors import ConfigError
from fedbayes.federation.engine_table import EngineKind
from tests.helpers.toy_methods import Median

OFFERED = {
    ("methods", "robust-middle"): "tests.helpers.toy_methods:Median",
    ("likelihoods", "same"): "fedbayes.likelihoods.categorical:Categorical",
    ("models", "tiny"): "tests.helpers.architectures:tiny",
    ("attacks", "flip"): "fedbayes.federation.attacks.changes:SignFlip",
    ("data", "ward"): "tests.wards:table",
    ("engines", "mine"): "tests.config.test_installed:MINE",
    ("engines", "odd"): "tests.config.test_installed:OFFERED",
}
MINE = EngineKind("one by one", start="fedbayes.federation.engines.sequential:start", here=True)


@pytest.fixture(autouse=True)
def offered(monkeypatch):
    """Entry points as if a package had declared them."""

    def entry_points(*, group, name):
        place = OFFERED.get((group.removeprefix("fedbayes."), name))
        return [EntryPoint(name, place, group)] if place else []

    monkeypatch.setattr(lazy, "entry_points", entry_points)


def test_names_stand_for_what_a_package_offers():
    config = Config.create(
        method={"name": "robust-middle"},
        task={"likelihood": "same"},
        model={"name": "tiny"},
        attack={"kind": "flip"},
        data={"name": "ward"},
    )
    assert config.method["name"] == OFFERED["methods", "robust-middle"]
    assert config.task["likelihood"] == OFFERED["likelihoods", "same"]
    assert config.model.name == OFFERED["models", "tiny"]
    assert config.attack.kind == OFFERED["attacks", "flip"]
    assert config.data.name == OFFERED["data", "ward"]
    assert find_method("robust-middle") is Median


@pytest.mark.parametrize(
    "settings",
    [
        {"method": {"name": "robust"}},
        {"task": {"likelihood": "sam"}},
        {"model": {"name": "tin"}},
        {"attack": {"kind": "flop"}},
        {"data": {"name": "wart"}},
    ],
)
def test_other_names_are_errors_as_before(settings):
    with pytest.raises(ConfigError, match="unknown "):
        Config.create(**settings)


def test_an_engine_of_another_package_runs_rounds():
    asked = {"data": {"clients": 2}, "rounds": 1}
    own = fedbayes.run(engine="mine", **asked)
    assert own.config.engine == "mine"
    assert own.summary["global_accuracy"] == fedbayes.run(**asked).summary["global_accuracy"]
    with pytest.raises(ConfigError, match=r"odd.*OFFERED, which is not a .*EngineKind"):
        fedbayes.run(engine="odd", **asked)
    with pytest.raises(ConfigError, match="engine is 'none'; expected auto"):
        fedbayes.run(engine="none", **asked)
