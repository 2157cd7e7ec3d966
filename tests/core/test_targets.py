"""Targets say what they are, and refuse what they cannot be."""

import pytest

from fedbayes.core.targets import Target
from fedbayes.errors import DataError


@pytest.mark.parametrize(
    ("target", "classes", "columns"),
    [
        (Target("class", ("cat", "dog", "cow")), 3, 1),
        (Target("labels", ("red", "round")), 0, 2),
        (Target("real", ("price",), (3.0,), (2.0,)), 0, 1),
        (Target("count", ("bikes", "cars")), 0, 2),
    ],
)
def test_sizes(target, classes, columns):
    assert (target.classes, target.columns) == (classes, columns)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ordinal", ("a",)), "class, labels, real, count, survival, not 'ordinal'"),
        (("class", ()), "at least one name"),
        (("labels", ("a", "b", "a")), "'a' is the name of two parts"),
        (("real", ("a", "b"), (1.0,), (1.0, 1.0)), "2 columns, and 1 of center"),
        (("real", ("a", "b"), (1.0, 1.0), (1.0, 0.0)), "scale of target 'b' is 0.0"),
        (("real", ("a",), (float("nan"),), (1.0,)), "center of target 'a' is nan"),
        (("count", ("a",), (0.0,)), "center of target 'a' is 0.0, not a number above 0"),
    ],
)
def test_what_is_no_target_is_refused(arguments, words):
    with pytest.raises(DataError, match=words):
        Target(*arguments)
