"""In what two kinds of samples differ."""

from dataclasses import replace

import pytest

from fedbayes.core.targets import Target
from fedbayes.data import Preprocessing, differences
from fedbayes.data.differences import CLASSES, FEATURES, SCALE, SHAPE, TARGETS

CLASS = Target("class", ("ant", "bee"))
REAL = Target("real", ("age",), (40.0,), (9.0,))
ONE = Preprocessing((2,), 1.0, (0.0, 1.0), (1.0, 2.0), CLASS, features=("width", "height"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shape": (2, 8, 8)}, [(SHAPE, "2", "2 x 8 x 8")]),
        ({"scale": 255.0}, [(SCALE, "1", "255")]),
        ({"features": ("height", "width")}, [(FEATURES, "width, height", "height, width")]),
        ({"features": ()}, [(FEATURES, "width, height", "without names")]),
        ({"target": Target("class", ("bee", "ant"))}, [(CLASSES, "ant, bee", "bee, ant")]),
        ({"target": REAL}, [(TARGETS, "class: ant, bee", "real: age")]),
        (
            {"scale": 2.0, "target": Target("labels", ("ant", "bee"))},
            [(SCALE, "1", "2"), (TARGETS, "class: ant, bee", "labels: ant, bee")],
        ),
        ({"mean": (3.0, 3.0), "dataset": "x", "digest": "y", "samples": 3, "label": "z"}, []),
    ],
)
def test_each_difference_is_named(changes, expected):
    assert differences(ONE, replace(ONE, **changes)) == expected


def test_rows_of_other_numbers_are_of_the_same_kind():
    other = replace(ONE, target=replace(REAL, center=(1.0,), scale=(2.0,)))
    assert differences(replace(ONE, target=REAL), other) == []


def test_features_without_names_may_be_any():
    unnamed = replace(ONE, features=())
    assert differences(ONE, unnamed, may_lack_names=True) == []
    assert differences(unnamed, ONE, may_lack_names=True) != []
