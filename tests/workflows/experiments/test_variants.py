"""Methods as they are named on a command line."""

import pytest

from fedbayes.config.config import Config
from fedbayes.errors import ConfigError
from fedbayes.methods import METHODS
from fedbayes.workflows.experiments.variants import Variant, own_settings, settled, variants


def test_labels_names_and_settings():
    text = "fedavg, fedprox:proximal=0.1 ,slow=fedprox:proximal=1:training.lr=0.01"
    assert variants(text) == [
        Variant("fedavg", "fedavg"),
        Variant("fedprox:proximal=0.1", "fedprox", ("method.proximal=0.1",)),
        Variant("slow", "fedprox", ("method.proximal=1", "training.lr=0.01")),
    ]
    assert variants("big=fedavg:rounds=9")[0].settings == ("rounds=9",)
    wide, other = variants("fedavg:model.hidden=[50,60]:training.lr=0.05, fedprox")
    assert wide.settings == ("model.hidden=[50,60]", "training.lr=0.05")
    assert settled(Config.create(), wide).model.hidden == (50, 60)
    assert other == Variant("fedprox", "fedprox")
    own = "own=examples.fedexp:FedExP:epsilon=2"
    assert variants(own) == [Variant("own", "examples.fedexp:FedExP", ("method.epsilon=2",))]


def test_all_are_those_of_the_package():
    assert [one.label for one in variants("all")] == list(METHODS)


def test_commas_and_colons_in_brackets_or_quotes_are_of_a_setting():
    text = (
        'wide=fedavg:model.hidden=[200, 20]:rounds=9,fedprox:note="a,b:c",'
        "it's (odd)=fedavg:a={b=[1,2]}"
    )
    assert variants(text) == [
        Variant("wide", "fedavg", ("model.hidden=[200, 20]", "rounds=9")),
        Variant('fedprox:note="a,b:c"', "fedprox", ('method.note="a,b:c"',)),
        Variant("it's (odd)", "fedavg", ("method.a={b=[1,2]}",)),
    ]
    config = settled(Config.create(), variants(text)[0])
    assert config.model.hidden == (200, 20)


def test_a_file_says_the_same(tmp_path):
    file = tmp_path / "methods.toml"
    file.write_text(
        '[fedavg]\n["strong prior"]\nmethod.name = "fedprox"\nmethod.proximal = 1.0\n'
        'training.lr = 0.01\naggregation.rule = "median"\n'
    )
    plain, strong = variants(str(file))
    assert plain == Variant("fedavg", "fedavg")
    config = settled(Config.create(rounds=3), strong)
    assert config.method == Config.create(method={"name": "fedprox", "proximal": 1.0}).method
    assert (config.training.lr, config.aggregation.rule, config.rounds) == (0.01, "median", 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedavgg", "did you mean 'fedavg'"),
        ("", "is empty."),
        ("fedavg,fedavg", "another label"),
        ("a b=fedavg,a_b=fedprox", "another label"),
        ("fedavg:training.lr=0.1:x", "is not a name with settings"),
        ("fedavg:data.alpha=1", "sets data.alpha, which all methods"),
        ("fedavg:seed=1", "sets seed, which all methods"),
        ("fedavg:damping=1", "method.damping is a parameter of"),
        ("nothing.toml", "file of methods"),
        ("fedavg:model.hidden=[20,fedprox", r"a bracket that is not closed: \] is missing"),
        ("..=fedavg", r"'..' is not a valid label\. Give fedavg a label"),
        ("=fedavg", "'' is not a valid label"),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(ConfigError, match=words):
        settled(Config.create(), variants(text)[0])


def test_files_that_are_none(tmp_path):
    file = tmp_path / "methods.toml"
    for content, words in (
        ("x = 1", "x is not a table"),
        ("[", "cannot read the methods"),
        ('["a\\nb"]\nmethod.name = "fedavg"', "in one line"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=words):
            variants(str(file))


def test_a_parameter_goes_to_the_methods_that_have_it():
    found = variants("fedavg,fedprox,fedprox:proximal=2")
    whole, rest, notes = own_settings(found, ["method.proximal=1", "rounds=2"])
    assert [v.settings for v in whole] == [
        (),
        ("method.proximal=1",),
        ("method.proximal=1", "method.proximal=2"),  # its own is the last, and counts
    ]
    assert settled(Config.create(), whole[2]).method["proximal"] == 2
    assert rest == ["rounds=2"]
    assert notes == [
        "method.proximal=1 works with fedprox, fedprox:proximal=2; fedavg has no such parameter"
    ]
    with pytest.raises(ConfigError, match="is a parameter of fedprox, not of fedavg"):
        own_settings(found[:1], ["method.proximal=1"])


def test_parameters_in_a_config_are_its_own_methods_alone():
    base = Config.create(method={"name": "fedprox", "proximal": 3.0})
    assert settled(base, variants("fedprox")[0]).method["proximal"] == 3
    assert settled(base, variants("fedavg")[0]).method == Config.create().method


def test_what_is_wrong_with_a_method_names_it():
    with pytest.raises(ConfigError, match=r"^slow: training\.lr"):
        settled(Config.create(), variants("slow=fedavg:training.lr=-1")[0])
