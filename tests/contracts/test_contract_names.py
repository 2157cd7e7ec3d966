"""The names that a method meets: few, of one kind, and former ones are told of."""

import re
import textwrap

import pytest
import torch
from pydantic import Field

import fedbayes
from fedbayes import contracts
from fedbayes.contracts import About, Method, PointEstimate, Weights, former
from fedbayes.contracts import method as module
from fedbayes.core.messages import dense
from fedbayes.errors import ConfigError
from fedbayes.methods import METHODS


def public():
    """Names of the class `Method` itself, without those of Pydantic and settings of users."""
    names = {n for n in (*vars(Method), *Method.__annotations__) if not n.startswith("_")}
    return names - {"model_config", "model_fields", "model_computed_fields", *Method.model_fields}


def test_a_method_meets_few_names():
    assert len(public()) <= 30, sorted(public())


@pytest.mark.parametrize("name", former.DECLARED_NOW)
def test_a_former_name_says_what_to_write_instead(name):
    assert name not in public()
    with pytest.raises(ConfigError, match=f"sets {name}, which has no effect. Declare") as told:
        type("Mine", (PointEstimate[Weights],), {name: "", "__module__": __name__})
    assert former.DECLARED_NOW[name] in str(told.value)


def test_a_parameter_may_have_a_former_name():
    class Mine(PointEstimate[Weights]):
        prior: float = 1.0

    assert Mine.model_fields["prior"].default == 1.0


def test_what_about_leaves_out_is_of_the_class_behind():
    class Mine(METHODS["fedadam"]):
        about = About("mine")

    assert Mine.about.summary == "mine"
    assert Mine.about.paper == METHODS["fedadam"].about.paper
    assert Mine.about.published == METHODS["fedadam"].about.published


def test_the_method_of_the_docstring_is_fedavg_that_shrinks():
    block = re.search(r"\n    class Forgetful.*?\n\n(?=\S)", module.__doc__, re.DOTALL)
    assert block is not None
    names = {**vars(contracts), "Field": Field, "dense": dense, "__name__": __name__}
    exec(textwrap.dedent(block[0]), names)
    settings = {"rounds": 1, "model": {"hidden": [4]}, "training": {"steps": 2}, "progress": False}
    settings["data"] = {"name": "digits", "limit": 200, "clients": 2}
    found = fedbayes.run(method=names["Forgetful"](keep=0.5), **settings).model
    for name, weights in fedbayes.run(method="fedavg", **settings).model.items():
        torch.testing.assert_close(found[name], weights / 2)
