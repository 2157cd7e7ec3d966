import re
import subprocess
import sys
import tomllib
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from pydantic import BaseModel
from torch import nn

from fedbayes import Simulation
from fedbayes.config.config import Config, settings
from fedbayes.config.schema import schema
from fedbayes.core.fields import idle
from fedbayes.core.tensors import pack
from fedbayes.errors import ConfigError, FedbayesWarning
from fedbayes.likelihoods import LIKELIHOODS
from fedbayes.methods import METHODS
from fedbayes.testing import assert_identical


def test_defaults_learn_digits():
    config = Config.create()
    assert config.data.name == "digits"
    assert config.method["name"] == "fedavg"
    assert config.method["weighting"] == "auto"
    assert config.closed().method["weighting"] == "samples"


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


VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(arguments=st.dictionaries(st.text(), VALUES, max_size=4))
@example({"opts": {"a b": 1}, "": {"": {}}, 'a."b"': [{"c d": []}], "line\nend": "\r\n\x00"})
@example({"several": [{"text": "x" * 80}, {"text": "y" * 80}], "last": [[10**20] * 6] * 3})
@settings_of_hypothesis(max_examples=60, deadline=None)
def test_arguments_of_any_form_are_the_same_in_a_stored_config(arguments):
    config = Config.create(model={"name": "some.where:net", "arguments": arguments}, rounds=7)
    again = tomllib.loads(config.dump())
    assert again["model"]["arguments"] == arguments
    assert Config.create(**again) == config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a": None}, "model.arguments: a is None, which a config cannot store. Leave it out"),
        ({"a": {"b": [1, {"c": None}]}}, "model.arguments: a.b[1].c is None"),
        ({"a": [1.0, float("inf")]}, "model.arguments: a[1] is inf; numbers of"),
        ({"a": {1: 2}}, "model.arguments: a has the key 1; keys of"),
        ({"a": np.float32(1)}, "model.arguments: a is a float32, which a config cannot store."),
        ({"a": nn.ReLU}, "model.arguments: a is a type, which a config cannot store."),
    ],
)
def test_arguments_that_no_config_can_hold_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Config.create(model={"name": "some.where:net", "arguments": arguments})


def test_dates_among_arguments_are_refused():
    with pytest.raises(ConfigError, match="a is a date"):
        Config.load(None, ["model.name=a:b", "model.arguments={a=1979-05-27}"])


def fields(model, prefix=""):
    """Keys of a model and of those in it."""
    for name in type(model).model_fields:
        inner = getattr(model, name)
        if isinstance(inner, BaseModel):
            yield from fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


@pytest.mark.parametrize("method", METHODS)
def test_a_dump_has_every_key(method, tmp_path):
    """Set, or in a comment under the head of its table; and it loads to what was dumped."""
    config = Config.create(method={"name": method}, data={"alpha": 0.3}, training={"steps": 3})
    text = config.dump()
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert Config.load(file) == config
    shown, table = [], ""
    for line in text.splitlines():
        if head := re.fullmatch(r"\[([\w.]+)\]", line):
            table = f"{head[1]}."
            if head[1].endswith(
                (".arguments", "privacy.clips", "ray.resources", "settings_chosen")
            ):
                shown.append(head[1])
        elif key := re.match(r"(?:# )?(\w+) = (?!.*= \.\.\.)", line):
            shown.append(table + key[1])
        assert len(line) <= 100
    there = [key for key in fields(config) if key not in ("task", "method")]
    parameters = ["name", *type(config.build_method()).model_fields]
    own = ["task.likelihood", *(f"method.{name}" for name in parameters)]
    assert sorted(shown) == sorted([*there, *own])
    # Tables are in the order of the fields.
    heads = [key for key in tomllib.loads(text) if key in ("data", "model", "training", "method")]
    assert heads == ["data", "model", "training", "method"]


def test_values_survive_a_dump(tmp_path):
    file = tmp_path / "config.toml"
    given = {
        "data": {"path": tmp_path / 'a "b"\\c.csv', "drop": ["a,b", "ü #"], "label": "a = b"},
        "model": {"name": "some.where:net", "arguments": {"deep": {"x": [1, 2.5]}, "t": True}},
        "training": {"lr": 1e-7},
    }
    config = Config.create(**given)
    file.write_text(config.dump())
    again = Config.load(file)
    assert again == config
    assert again.data.drop == ("a,b", "ü #")
    assert again.model.arguments == {"deep": {"x": [1, 2.5]}, "t": True}


def test_settings_tell_every_key_and_default():
    """The rows agree with the models of the tables."""
    rows = {row.key: row for row in settings("virtual")}
    config = Config.create(method={"name": "virtual"})
    whole = config.model_dump(mode="json")
    for key in fields(config):
        if key in ("task", "method"):
            continue
        *table, last = key.split(".")
        values = whole[table[0]] if table else whole
        assert rows[key].default == values[last], key
        assert rows[key].description, key
    assert rows["training.lr"].type == "number > 0 | auto"
    kinds = "sgd | adam | amsgrad | adamax | package.module:name"
    assert rows["training.optimizer"].type.startswith(kinds)
    assert rows["model.hidden"].type == "integer, or list of integers"
    assert rows["data.class_counts"].type == "list of lists of integers"
    assert rows["data.test"].type == "default | official | clients | number"
    assert rows["method.damping"].type == "number > 0, <= 1 | auto"
    assert rows["method.lateral"].type == "true | false"
    assert rows["workers"].only == "engine is workers"
    assert rows["training.epochs"].only == "training.steps is unset"
    assert rows["secure.range"].only == "secure.enabled is true"
    assert rows["seed"].only == ""
    assert set(METHODS) == set(rows["method.name"].choices)
    assert {"auto", *LIKELIHOODS} == set(rows["task.likelihood"].choices)


def test_the_schema_has_every_key():
    whole = schema()
    parts = {"": whole["properties"]}
    for name, place in whole["properties"].items():
        if "$ref" in place:
            parts[f"{name}."] = whole["$defs"][place["$ref"].rpartition("/")[2]]["properties"]
    found = {prefix + name for prefix, part in parts.items() for name in part}
    for row in settings(None):
        assert row.key in found or row.key in ("task.likelihood", "method.name")
    branches = {b["title"]: b for b in whole["properties"]["method"]["oneOf"]}
    assert branches.keys() == {*METHODS, "your own"}
    for name, kind in METHODS.items():
        assert branches[name]["properties"].keys() == {"name", *kind.model_fields}
        assert branches[name]["properties"]["name"]["const"] == name
        assert branches[name]["additionalProperties"] is False
    hidden = whole["$defs"]["ModelSettings"]["properties"]["hidden"]["anyOf"]
    assert {"type": "integer"} in hidden


@pytest.mark.parametrize(
    ("given", "drop"),
    [
        ("data.drop=sex", ("sex",)),
        ("data.drop=sex,age", ("sex", "age")),
        ("data.drop='sex, age'", ("sex", "age")),
        ("data.drop=['sex','age, years']", ("sex", "age, years")),
        ("data.drop=7", ("7",)),
        ("data.drop=[]", ()),
    ],
)
def test_one_or_several(given, drop):
    assert Config.load(None, ["data.path=own.csv", given]).data.drop == drop


def test_one_or_several_numbers(tmp_path):
    assert Config.load(None, ["model.hidden=200"]).model.hidden == (200,)
    assert Config.load(None, ["model.hidden=200,100"]).model.hidden == (200, 100)
    assert Config.create(model={"hidden": np.int64(5)}).model.hidden == (5,)
    assert Config.create(data={"path": "own.csv", "drop": "sex"}).data.drop == ("sex",)
    assert Config.create(cohort=np.int64(3)).cohort == 3
    file = tmp_path / "c.toml"
    file.write_text('[model]\nhidden = 7\n[data]\npath = "own.csv"\nclasses = "yes,no"\n')
    assert Config.load(file).model.hidden == (7,)
    assert Config.load(file).data.classes == ("yes", "no")


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
        ({"round": 3}, r"round is not a setting \(did you mean 'rounds'\?\)"),
        ({"training": {"learning_rate": 3}}, "training.learning_rate is not a setting.*lr"),
        ({"training": {"optimizer": "lion"}}, "training.optimizer is 'lion'; expected sgd.*adamax"),
        ({"rounds": "many"}, "rounds is 'many'.*integer"),
        ({"rounds": 0}, "rounds is 0; expected integer >= 1"),
        ({"cohort": 0}, "cohort is 0"),
        ({"cohort": 1.5}, "cohort is 1.5.*fraction"),
        ({"method": {"name": "fedavgg"}}, "unknown method 'fedavgg'.*'fedavg'"),
        ({"method": {"name": "fedprox", "prox": 1}}, "method.prox is not a setting.*proximal"),
        ({"method": {"name": "fedprox", "proximal": -1}}, "method.proximal is -1"),
        (
            {"method": {"name": "local", "weighting": "uniform", "proximal": 1, "start": "x"}},
            "(?s)weighting is a parameter of fedavg, fedprox, .*, not of local. Choose the method "
            "with --method fedavg.*proximal is a parameter of fedprox, not of local",
        ),
        ({"method": {"name": "no.such:Method"}}, "cannot find the method"),
        ({"method": {"name": "fedbayes.models:MLP"}}, "not a class derived from"),
        ({"method": {"name": 3}}, "must be a string"),
        ({"data": {"name": "mnits"}}, "mnits.*did you mean 'mnist'"),
        ({"model": {"name": "lenet"}}, "'lenet' .did you mean 'lenet5'"),
        ({"engine": "wrkers"}, r"engine is 'wrkers' \(did you mean 'workers'\?\); expected"),
        ({"lr": 0.1}, r"^lr is not a setting \(did you mean 'training.lr'\?\)$"),
        ({"name": "x"}, "'data.name' or 'model.name' or 'method.name'"),
        ({"methd": {"name": "fedprox"}}, r"^methd is not a setting \(did you mean 'method'\?\)$"),
        (
            {"training": {"lrr": 1}},
            r"^training.lrr is not a setting \(did you mean 'training.lr'\?\)$",
        ),
        ({"data": {"shards": 3}}, r"data.shards is .*did you mean 'data.shards_per_client'\?\)$"),
        (
            {"training": {"gamma": 1}},
            "training.gamma is not a setting; here there are optimizer, lr",
        ),
        ({"proximal": 1, "method": {"name": "fedprox"}}, "did you mean 'method.proximal'"),
        ({"method": {"lr": 1}}, "method.lr is not a setting .did you mean 'training.lr'"),
        ({"cohort": "ten"}, "^cohort is 'ten'; expected number. Give clients_per_round"),
        ({"cohort": []}, r"^cohort is \[\]; expected number"),
        ({"cohort": int}, "^cohort is .*; expected number"),
        (
            {"method": {"name": "fedsparse", "l0": "hi"}},
            r"^method.l0 is 'hi'.*; expected low \| mid \| high \| number \| auto$",
        ),
        ({"model": {"hidden": ["a", 5]}}, "^model.hidden has 'a'; expected integer, or list"),
        ({"rounds": {"x": 1}}, "^rounds is a table; expected integer >= 1$"),
        ({"method": 3}, "^method is 3; give a table .*method.name = 'fedavg'$"),
        ({"data": 3}, "^data is 3; give a table .*data.name = 'digits'$"),
        ({"a": {"b": {"c": 1}}}, "^a is not a setting; here there are seed, .*, method$"),
        ({"seed": np.array([1])}, r"^seed is \[1\]; expected integer >= 0$"),
    ],
)
def test_errors_name_the_key(settings, words):
    with pytest.raises(ConfigError, match=words):
        Config.create(**settings)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rounds"], "^rounds has no value. Write key=value"),
        (["method.proximal"], "^method.proximal has no value. Write key=value"),
        (["=3"], "is not a setting. Write key=value"),
        (["method.proximal=0.1"], "^method.proximal is a parameter of fedprox, not of fedavg"),
        (["rounds="], "rounds= has no value"),
        (["rounds=3", "rounds.x=1"], "rounds is not a table"),
    ],
)
def test_overrides_that_are_none(overrides, words):
    with pytest.raises(ConfigError, match=words):
        Config.load(None, overrides)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="config file"):
        Config.load(tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.load(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML: it is not UTF-8 text"):
        Config.load(bad)


@pytest.mark.parametrize(
    "key",
    [
        "method.name=virtual method.prior_std",
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
    from fedbayes.models.variational import stack

    with pytest.raises(ModelError, match="not with 'cnn'"):
        build(ModelSettings(name="cnn", dropout=0.5), (1, 28, 28), 10, seed=0)
    with_dropout = build(ModelSettings(name="lenet5", dropout=0.5), (1, 28, 28), 10, seed=0)
    before = [
        [type(m).__name__ for m in stage.before] for stage in stack(with_dropout.module).stages
    ]
    assert before == [[], ["MaxPool2d"], ["MaxPool2d", "Flatten", "Dropout"], ["Dropout"]]


@pytest.mark.filterwarnings("ignore:cohort:fedbayes.errors.FedbayesWarning")
def test_cohorts():
    assert Config.create(cohort=0.1).cohort_size(100) == 10
    assert Config.create(cohort=0.001).cohort_size(100) == 1
    assert Config.create(cohort=1).cohort_size(100) == 1
    assert Config.create(cohort=1.0).cohort_size(100) == 100
    with pytest.raises(ConfigError, match="Choose 5"):
        Config.create(cohort=6).cohort_size(5)


def test_mistakes_are_told_without_pytorch():
    """They come up before anything is imported that takes long."""
    code = """
import sys
from fedbayes.cli import main
for arguments in sys.argv[1:]:
    sys.argv = ["fedbayes", *arguments.split()]
    try:
        main()
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules, "pandas" in sys.modules)
"""
    mistakes = {
        "run --method fedavgg": "fedavg",
        "run --dataset mnits": "mnist",
        "run --model lenet": "lenet5",
        "run --engine wrkers": "workers",
        "run --partition dirichet": "dirichlet",
        "run --set trainning.lr=1": "training",
        "run --set training.lrr=1": "training.lr",
        "run --set lr=0.1": "training.lr",
        "run --cohort ten": "number",
        "run --rounds ten": "integer",
        "run --metod fedavg": "--method",
        "settings trainin": "training",
        "data show mnits": "mnist",
        "data show bc.csv": "as data.path: --set data.path=bc.csv",
        "federate run --set rouds=1": "rounds",
    }
    done = subprocess.run([sys.executable, "-c", code, *mistakes], capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == ["2 False False"] * len(mistakes), done.stderr
    messages = done.stderr.splitlines()
    for words, message in zip(mistakes.values(), messages, strict=True):
        assert message.startswith("error: ")
        assert words in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"model": {"name": "tests.helpers.toy_models:stack", "hidden": [5]}},
            "model.hidden has no effect",
        ),
        ({"data": {"partition": "iid", "alpha": 0.1}}, "data.alpha has no effect"),
        ({"training": {"steps": 3, "epochs": 5}}, "training.epochs has no effect"),
        ({"training": {"decay": 0.5}}, "must be exponential or step"),
        ({"privacy": {"delta": 0.1}}, "privacy.noise is 0.0, and must be above 0"),
        ({"training": {"min_improvement": 0.5}}, "training.patience is unset"),
        ({"workers": 7}, "workers has no effect: engine is auto"),
        ({"method": {"name": "laplace", "server_lr": 0.5}}, "method.server_lr has no effect"),
        (
            {"method": {"name": "fedbe", "steps": 5}},
            "method.steps has no effect: method.inputs is unset",
        ),
        (
            {"method": {"name": "fedlap", "covariance": "none", "predictions": 3}},
            "method.predictions has no effect",
        ),
        (
            {"method": {"name": "fedsparse", "update_rule": "average", "server_lr": 0.1}},
            "method.server_lr has no effect: method.update_rule is average",
        ),
        (
            {"method": {"name": "fedsparse", "update_rule": "average", "server_gate_lr": 0.1}},
            "method.server_gate_lr has no effect",
        ),
        (
            {"method": {"name": "gpi-fnm", "starts": 3}},
            "method.starts has no effect: method.alternations is 0, and must be above 0",
        ),
        (
            {
                "method": {"name": "scaffold"},
                "privacy": {"noise": 1.0, "repeatable": True},
                "aggregation": {"clip": 1.0, "outliers": "leave-out"},
            },
            "aggregation.outliers has no effect: with noise, updates are not compared",
        ),
        (
            {
                "privacy": {"noise": 1.0, "repeatable": True},
                "aggregation": {"clip": 1.0, "max_weight": 5.0},
            },
            "aggregation.max_weight has no effect: with noise all updates have weight 1",
        ),
        (
            {
                "method": {"weighting": "uniform"},
                "engine": "flower-simulation",
                "secure": {"enabled": True, "max_weight": 7.0},
                "data": {"clients": 3},
            },
            "secure.max_weight has no effect: with fedavg",
        ),
        *(
            ({"method": {"name": "global"}, **settings}, f"{words} has no effect: global pools all")
            for settings, words in (
                ({"clients_per_round": 1}, "clients_per_round"),
                ({"sampling": "cyclic"}, "sampling"),
                ({"min_reports": 2}, "min_reports"),
                ({"aggregation": {"max_weight": 3.0}}, "aggregation.max_weight"),
                ({"aggregation": {"max_change": 3.0}}, "aggregation.max_change"),
                ({"method": {"name": "global", "weighting": "uniform"}}, "method.weighting"),
            )
        ),
        (
            {
                "privacy": {"noise": 1.0, "repeatable": True},
                "aggregation": {"clip": 1.0},
                "evaluate_local_every": 2,
            },
            "evaluate_local_every has no effect: .* privacy.metrics is off",
        ),
        *(
            ({"sampling": sampling}, f"sampling = '{sampling}' has no effect: all clients are")
            for sampling in ("cyclic", "poisson")
        ),
        ({"aggregation": {"rule": "median"}}, "with 2 updates per round it is their mean"),
        (
            {"training": {"patience": 2, "epochs": 3}},
            "it can stop after epoch 3, and training.epochs",
        ),
        (
            {"training": {"patience": 1, "validation": 0.2, "epochs": 1}},
            "training.epochs is 1, and no client trains on the samples of training.validation",
        ),
        (
            {"method": {"name": "feddrop", "conv_rate": 0.2}},
            "method.conv_rate has no effect: this network has no filters to drop",
        ),
        (
            {"training": {"schedule": "step", "decay": 0.5}, "rounds": 10},
            r"the first step is after round 10 \(training.decay_every\), and rounds is 10",
        ),
    ],
)
def test_a_setting_without_effect_is_told(settings, words):
    whole = {"rounds": 1, **settings}
    whole["data"] = {"clients": 2, "limit": 60, **settings.get("data", {})}
    with pytest.warns(FedbayesWarning, match=words):
        Simulation(Config.create(**whole)).close()


@pytest.mark.parametrize("sampling", ["cyclic", "poisson"])
def test_ways_to_draw_all_clients_are_one(sampling):
    whole = {"rounds": 2, "data": {"clients": 3, "limit": 60}, "model": {"hidden": 4}}
    ends = []
    for way in ("uniform", sampling):
        with warnings.catch_warnings(action="ignore"):
            simulation = Simulation(Config.create(**whole, sampling=way))
        with simulation:
            ends.append(list(simulation)[-1].server)
    assert_identical(pack(ends[0]), pack(ends[1]))


def test_seeking_where_there_are_no_classes_is_told(tmp_path):
    frame = pd.DataFrame({"a": range(60), "b": [0, 1, 5] * 20, "y": [0.5, 1.5, 9.0] * 20})
    frame.to_csv(tmp_path / "own.csv", index=False)
    data = {"path": tmp_path / "own.csv", "label": "y", "clients": 2}
    whole = {"data": data, "task": {"likelihood": "gaussian"}, "model": {"hidden": 3}}
    for seek, words in ((0.3, "method.seek has no effect"), (0.0, "")):
        method = {"name": "fedfuse", "seek": seek}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Simulation(Config.create(**whole, method=method)).close()
        told = [str(one.message) for one in said if "method.seek" in str(one.message)]
        assert [one.startswith(words) for one in told] == [True] * bool(words)


def test_settings_that_have_an_effect_are_not_told(tmp_path):
    frame = pd.DataFrame({"a": range(60), "b": 1.0, "site": [0, 1, 2] * 20, "y": [0, 1] * 30})
    frame.to_csv(tmp_path / "own.csv", index=False)
    own = {"path": tmp_path / "own.csv", "label": "y", "drop": "b", "group": "site"}
    training = {"schedule": "step", "decay": 0.5, "decay_every": 3, "epochs": 2}
    config = Config.create(data=own, training=training, model={"hidden": 3})
    assert list(idle(config, resolved={"data.partition": "natural"})) == []
    acting = {"patience": 1, "epochs": 3}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "training.schedule")
        Simulation(config.model_copy(update={"rounds": 4})).close()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "training.patience|aggregation.rule")
        for training in (acting, acting | {"patience": 9, "validation": 0.2}):
            rule = {"rule": "median"}
            whole = Config.create(data=own, training=training, aggregation=rule)
            Simulation(whole).close()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "method.starts|method.warm")
        method = {"name": "gpi-fnm", "form": "wide", "starts": 3, "warm": False}
        Simulation(Config.create(data=own, method=method, model={"hidden": 3})).close()
    with pytest.warns(FedbayesWarning, match="data.partition is natural"):
        Simulation(Config.create(data={**own, "alpha": 0.1})).close()
    form = {"date_format": "%d.%m.%Y"}
    with pytest.warns(FedbayesWarning, match="data.date_format has no effect: data.dates is unset"):
        Simulation(Config.create(data=own | form)).close()
    assert list(idle(Config.create(data={"path": "x.csv", "dates": "when", **form}))) == []


def test_standardize_may_be_true_or_false():
    for value, meant in ((True, "on"), (False, "off"), ("auto", "auto")):
        assert Config.create(data={"standardize": value}).data.standardize == meant


def test_a_name_of_another_type_is_an_error():
    with pytest.raises(ConfigError, match=r"model\.name is \[\]"):
        Config.create(model={"name": [], "pretrained": "x"}, data={"path": "t.csv"})
