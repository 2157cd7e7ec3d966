"""Settings of a fusion in function space from options."""

import pytest

from fedbayes.config.given import assign
from fedbayes.errors import ConfigError
from fedbayes.fusion.settings import AdapterFunctionSettings, DistillationSettings, FunctionSettings
from fedbayes.workflows.fuse import function_settings as of_function


def function_settings(entries, *more, **options):
    given = {}
    for entry in entries:
        assign(given, entry)
    return of_function.function_settings(given.get("function", {}), *more, **options)


def test_nothing_given_is_the_default():
    assert function_settings([]) == FunctionSettings()


def test_settings_of_all_tables():
    found = function_settings(
        [
            "function.draws=512",
            "function.balance=true",
            "function.seeking.share=0.3",
            "function.seeking.steps=4",
            "function.distillation.lr=0.01",
            "function.distillation.loss=kl",
        ],
        posterior="last-layer",
    )
    assert (found.draws, found.balance, found.seeking.share) == (512, True, 0.3)
    assert found.distillation == DistillationSettings(lr=0.01, loss="kl")
    assert found.posterior == "last-layer"


def test_none_is_a_value_where_it_has_a_meaning():
    """As the help says: without patience training never stops early."""
    found = function_settings(["function.distillation.patience=none", "function.matched=none"])
    assert found == FunctionSettings(distillation=DistillationSettings(patience=None))
    with pytest.raises(ConfigError, match=r"function.distillation\.steps is 'none'"):
        function_settings(["function.distillation.steps=none"])


def test_minutes():
    assert function_settings([], 0).distillation is None
    found = function_settings(["function.distillation.lr=0.01"], 2.5).distillation
    assert found == DistillationSettings(lr=0.01, minutes=2.5, steps=10**9)


@pytest.mark.parametrize(
    ("entries", "minutes", "words"),
    [
        (["function.drawn=5"], None, "function.drawn is not a setting.*'function.draws'"),
        (["function.draws=5"], None, "function.draws is 5; expected integer >= 64"),
        (["function.seeking.share=2"], None, "function.seeking.share is 2; expected number"),
        (
            ["function.seeking.steps=4"],
            None,
            "seeking: steps = 4 has no effect",
        ),
        (["function.lr=1"], None, "did you mean 'function.distillation.lr'"),
        (["function.distillation.lrs=1"], None, "did you mean 'function.distillation.lr'"),
        (["function.distillation.loss=nll"], None, "auto | logits | kl"),
        (["function.distillation=0"], None, r"is a table\. Set its keys, such as .*--minutes 0"),
        (["function.distillation.lr=1"], 0, "lr has no effect with --minutes 0"),
        (["function.distillation.steps=1"], 1, "steps and --minutes exclude each other"),
    ],
)
def test_what_is_no_setting_is_told(entries, minutes, words):
    with pytest.raises(ConfigError, match=words):
        function_settings(entries, minutes)


@pytest.mark.parametrize(
    ("given", "minutes", "wanted"),
    [
        ({}, None, (200, None)),
        ({}, 2.0, (10**9, 2.0)),
        ({"distillation": {"minutes": 3.0}}, None, (10**9, 3.0)),
        ({"distillation": {"lr": 0.01}}, None, (200, None)),
        ({}, 0.0, None),
    ],
)
def test_adapters_train_for_200_steps_or_the_time_that_is_given(given, minutes, wanted):
    found = of_function.adapter_settings(AdapterFunctionSettings, given, minutes)
    assert isinstance(found, AdapterFunctionSettings)
    training = found.distillation
    assert (training and (training.steps, training.minutes)) == wanted
