import pytest

from fedbayes.errors import ConfigError
from fedbayes.experiment.config import Config


def test_defaults_learn_digits():
    config = Config.create()
    assert config.data.name == "digits"
    assert config.method["name"] == "fedavg"
    assert config.method["weighting"] == "samples"


def test_a_dump_loads_again(tmp_path):
    config = Config.create(
        cohort=0.25,
        method={"name": "fedprox", "proximal": 0.5},
        model={"hidden": [5, 6]},
        training={"steps": 7},
    )
    file = tmp_path / "config.toml"
    file.write_text(config.dump())
    assert Config.load(file) == config


def test_overrides_change_a_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('rounds = 3\n[method]\nname = "fedprox"\nproximal = 0.5\n')
    config = Config.load(file, ["training.lr=0.01", "model.hidden=[7]", "data.partition=iid"])
    assert config.rounds == 3
    assert config.training.lr == 0.01
    assert config.model.hidden == (7,)
    assert config.data.partition == "iid"
    assert config.build_method().proximal == 0.5
    assert Config.load(file, ["method.name=fedprox"]).method["proximal"] == 0.5
    # Another method does not inherit the parameters of the file's.
    assert "proximal" not in Config.load(file, ["method.name=fedavg"]).method


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"round": 3}, r"round is no setting \(did you mean 'rounds'\?\)"),
        ({"training": {"learning_rate": 3}}, "training.learning_rate is no setting.*lr"),
        ({"training": {"optimizer": "lion"}}, "training.optimizer is 'lion'; expected sgd.*adamax"),
        ({"rounds": "many"}, "rounds is 'many'.*integer"),
        ({"rounds": 0}, "rounds is 0; expected integer >= 1"),
        ({"cohort": 0}, "cohort is 0"),
        ({"cohort": 1.5}, "cohort is 1.5.*fraction"),
        ({"method": {"name": "fedavgg"}}, "no method is called 'fedavgg'.*'fedavg'"),
        ({"method": {"name": "fedprox", "prox": 1}}, "method.prox is no setting.*proximal"),
        ({"method": {"name": "fedprox", "proximal": -1}}, "method.proximal is -1"),
        ({"method": {"name": "no.such:Method"}}, "cannot find the method"),
        ({"method": {"name": "fedbayes.models:MLP"}}, "no class derived from"),
        ({"method": {"name": 3}}, "must be a string"),
        ({"data": {"name": "mnits"}}, "mnits"),
    ],
)
def test_errors_name_the_key(settings, words):
    with pytest.raises(ConfigError, match=words):
        Config.create(**settings)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [(["rounds"], "write key=value"), (["rounds=3", "rounds.x=1"], "rounds is not a table")],
)
def test_overrides_that_are_none(overrides, words):
    with pytest.raises(ConfigError, match=words):
        Config.load(None, overrides)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="no config file"):
        Config.load(tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.load(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        Config.load(bad)


@pytest.mark.parametrize(
    "key",
    [
        "method.name=virtual method.prior_deviation",
        "training.lr",
        "round_timeout",
        "aggregation.clip",
        "data.alpha",
    ],
)
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_numbers_are_finite(key, value):
    with pytest.raises(ConfigError, match="finite"):
        Config.load(None, f"{key}={value}".split())


def test_dropout_is_for_networks_that_have_it():
    from fedbayes.errors import ModelError
    from fedbayes.models.construct import ModelSettings, build
    from fedbayes.models.variational import stages

    with pytest.raises(ModelError, match="'cnn' has none"):
        build(ModelSettings(name="cnn", dropout=0.5), (1, 28, 28), 10, seed=0)
    with_dropout = build(ModelSettings(name="lenet5", dropout=0.5), (1, 28, 28), 10, seed=0)
    before = [[type(m).__name__ for m in stage.before] for stage in stages(with_dropout.module)]
    assert before == [[], ["MaxPool2d"], ["MaxPool2d", "Flatten", "Dropout"], ["Dropout"]]


def test_cohorts():
    assert Config.create(cohort=0.1).cohort_size(100) == 10
    assert Config.create(cohort=0.001).cohort_size(100) == 1
    assert Config.create(cohort=1).cohort_size(100) == 1
    assert Config.create(cohort=1.0).cohort_size(100) == 100
    with pytest.raises(ConfigError, match="there are 5"):
        Config.create(cohort=6).cohort_size(5)
