"""Needs of methods: which training they take, and that subclasses add to those of their bases."""

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fedbayes.contracts import Method
from fedbayes.contracts.needs import langevin, own_prior, sgd_steps, sum_of_gradients, where
from fedbayes.errors import ConfigError
from fedbayes.inference.settings import LocalTraining
from fedbayes.methods import METHODS

ONE = SimpleNamespace(name="one", kind="a")


def run_of(**training):
    return SimpleNamespace(training=LocalTraining(**training))


@pytest.mark.parametrize(
    ("need", "settings", "why"),
    [
        (langevin, {"optimizer": "adam"}, "sgd"),
        (langevin, {"momentum": 0.9}, "sgd"),
        (langevin, {"weight_decay": 0.1}, "sgd"),
        (langevin, {"patience": 2}, "one needs samples from all steps"),
        (own_prior, {"weight_decay": 0.1}, "one has its own prior"),
        (sgd_steps, {"optimizer": "adam"}, "one needs steps of SGD, got training.optimizer"),
        (sum_of_gradients, {"optimizer": "adam"}, "momentum 0"),
        (sum_of_gradients, {"momentum": 0.9}, "momentum 0"),
    ],
)
def test_training_that_a_method_cannot_work_with(need, settings, why):
    need(ONE, run_of(lr=0.3, epochs=4))
    with pytest.raises(ConfigError, match=why):
        need(ONE, run_of(**settings))
    with pytest.raises(ConfigError, match=why):
        where("kind", "a", "b", need=need)(ONE, run_of(**settings))
    where("kind", "b", need=need)(ONE, run_of(**settings))


def test_a_subclass_adds_to_what_its_bases_need():
    for method in METHODS.values():
        for base in method.__mro__:
            if "about" in vars(base):
                assert set(base.about.needs) <= set(method.about.needs)


def test_every_method_asks_what_its_class_needs(monkeypatch):
    """A `check` of its own comes on top of the needs."""
    asked = []
    about = replace(Method.about, needs=(lambda method, run: asked.append(method.name),))
    for name, kind in METHODS.items():
        monkeypatch.setattr(kind, "about", about)
        with suppress(Exception):  # what else it needs of a run
            kind().check(SimpleNamespace(training=LocalTraining()))
        assert asked == [name]
        asked.clear()
