"""What every engine keeps to, also one that a row of the table adds."""

import json

import numpy as np
import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from fedbayes import Config, Simulation, run
from fedbayes.cli import app
from fedbayes.config.config import settings
from fedbayes.config.schema import schema
from fedbayes.core import seeds
from fedbayes.errors import ConfigError, EngineError
from fedbayes.federation import engine_table
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.engine_table import ENGINES, EngineKind, takers
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.testing import assert_identical
from tests.helpers.toy_engine import TOY, Backwards

pytest.importorskip("flwr")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """One more row of the table."""
    monkeypatch.setitem(engine_table._BUILT_IN, "toy", TOY)


def config(engine, method="scaffold", **more):
    return Config.create(
        seed=3,
        rounds=2,
        cohort=3,
        engine=engine,
        data={"name": "digits", "clients": 4, "partition": "iid"},
        model={"hidden": [8]},
        method={"name": method},
        **more,
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run(config("sequential"), tmp_path_factory.mktemp("sequential"))


def told(result):
    """Lines of the rounds, less what a clock and a network say."""
    without = ("seconds", "link_down", "link_up")
    return [{k: v for k, v in line.items() if k not in without} for line in result.metrics]


@pytest.mark.parametrize(
    "engine",
    [
        "workers",
        "flower-simulation",
        "tests.helpers.toy_engine:TOY",
        pytest.param("ray", marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_the_sequential_engine(engine, expected, tmp_path):
    assert ENGINES[engine].exact
    ended = run(config(engine), tmp_path / "run")
    assert_identical(ended.model, expected.model)
    assert told(ended) == told(expected)


def test_every_engine_that_a_run_can_start_is_tried_here():
    # `stacked`, which rounds otherwise, is in inference/test_stacked.py; `auto` in test_auto.py.
    tried = {"auto", "sequential", "workers", "flower-simulation", "toy", "ray", "stacked"}
    assert {name for name, kind in ENGINES.items() if kind.start} == tried


@pytest.mark.parametrize(
    "engine",
    [
        "sequential",
        pytest.param("workers", marks=pytest.mark.slow),
        "flower-simulation",
        "toy",
        pytest.param("ray", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_where_private_states_are_said_to_be(engine, expected, tmp_path):
    with Simulation(config(engine), tmp_path / "run") as simulation:
        next(iter(simulation))
    where = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert ("nodes" in where) == (ENGINES[engine].states == "nodes")
    with Simulation(None, tmp_path / "run") as simulation:
        list(simulation)
    assert_identical(simulation.folder.model(), expected.model)


def test_a_row_is_all_that_a_config_and_its_texts_need():
    assert config("toy").engine == "toy"
    (row,) = [row for row in settings(None) if row.key == "engine"]
    assert row.choices == tuple(ENGINES)
    assert row.type == " | ".join(ENGINES)
    help_text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).stdout
    assert "flower-simulation, flower, toy. Default: auto." in " ".join(
        help_text.replace("│", "").split()
    )
    with Simulation(config("toy")) as simulation:
        assert isinstance(simulation.engine, Backwards)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("toi", r"engine is 'toi' \(did you mean 'toy'\?\); expected auto \| sequential"),
        (3, r"engine is 3; expected auto \| sequential"),
    ],
)
def test_another_name_is_refused_with_those_that_there_are(engine, words):
    with pytest.raises(ConfigError, match=words):
        config(engine)


def test_a_schema_for_editors_has_the_names_that_are_shipped(monkeypatch):
    monkeypatch.delitem(engine_table._BUILT_IN, "toy")
    engine = TypeAdapter(dict).validate_json(json.dumps(schema()))["properties"]["engine"]
    assert engine["enum"] == [
        *("auto", "sequential", "stacked"),
        *("workers", "ray", "flower-simulation", "flower"),
    ]


def test_an_engine_that_rounds_otherwise_says_so(monkeypatch):
    monkeypatch.setitem(
        engine_table._BUILT_IN, "toy", EngineKind("x", start=TOY.start, exact=False)
    )
    with pytest.warns(UserWarning, match="engine 'toy' rounds differently"):
        Simulation(config("toy")).close()


def test_an_engine_that_cannot_aggregate_in_secret_is_refused():
    with pytest.raises(ConfigError, match=r"needs engine = .* got engine 'toy'"):
        Simulation(config("toy", method="fedavg", secure={"enabled": True}))


def test_an_engine_of_another_command_names_it(tmp_path):
    with (
        Simulation(config("flower"), tmp_path / "run") as simulation,
        pytest.raises(EngineError, match=r"`fedbayes federate CONFIG`, or resume with .* resume"),
    ):
        next(iter(simulation))


def test_settings_of_one_engine_are_said_to_be():
    assert takers("workers") == ("workers",)
    assert takers("round_timeout") == ("flower-simulation", "flower")
    only = {row.key: row.only for row in settings(None)}
    assert only["round_timeout"] == "engine is flower-simulation or flower"


def test_a_place_is_that_of_an_engine():
    with pytest.raises(ConfigError, match=r"Backwards, which is not a fedbayes.*EngineKind"):
        Simulation(config("tests.helpers.toy_engine:Backwards"))


def test_between_clients_the_global_generators_are_those_of_the_process():
    class Runtime:
        def train(self, task):
            with seeds.global_rng(task.client, "layers"):
                return np.random.random()  # noqa: NPY002

    np.random.seed(7)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    outcomes = Sequential(Runtime()).train([Task(client, 1, b"", None) for client in range(2)])
    next(outcomes)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    assert not seeds._free
