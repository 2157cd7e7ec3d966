"""Which labels are classes, and how they and groups are read."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

from fedbayes.data import DataSettings, load_dataset
from fedbayes.errors import DataError

RNG = np.random.default_rng(0)


def load(tmp_path, label, suffix="csv", kinds=(), **asked):
    """A data set of two features and these labels, from a file of this kind."""
    x = RNG.normal(size=(len(label), 2)).astype(np.float32)
    file = tmp_path / f"own.{suffix}"
    if suffix == "csv":
        pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": label}).to_csv(file, index=False)
    elif suffix == "npz":
        np.savez(file, x=x, y=np.asarray(label))
    else:
        users = {"u": {"x": x.tolist(), "y": [float(value) for value in label]}}
        file.write_text(json.dumps({"users": ["u"], "num_samples": [2], "user_data": users}))
    return load_dataset(DataSettings(path=file, **asked), kinds)


@pytest.mark.parametrize("suffix", ["csv", "npz", "json"])
def test_a_regression_target_is_no_classes(tmp_path, suffix):
    from sklearn.datasets import load_diabetes

    target = load_diabetes().target
    with pytest.raises(DataError, match=r"214 different values in 442 rows.*a quantity.*classes"):
        load(tmp_path, target, suffix, kinds=("class",))


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (RNG.normal(size=5000).round(1), "a quantity, not classes"),
        (np.arange(9), "a quantity or an identifier"),
        ([f"patient-{k}" for k in range(300)], "identifiers"),
        (np.repeat(np.arange(50), 4), "50 different values in 200 rows"),
        (np.arange(1001).repeat(5), "1,001 different values"),
        ([*range(99), "high"], "a number in 99 of 100 rows, but 'high' in row 100 is not."),
    ],
)
def test_what_is_no_class_is_refused(tmp_path, label, says):
    with pytest.raises(DataError, match=says):
        load(tmp_path, label, kinds=("class",))


@pytest.mark.parametrize(
    ("values", "kinds", "told"), [(10, (), False), (11, (), True), (11, ("class",), False)]
)
def test_numbers_that_may_be_counts_are_told(tmp_path, values, kinds, told):
    dataset = load(tmp_path, np.resize(np.arange(values), 200), kinds=kinds)
    assert any("read as classes" in note for note in dataset.notes) == told


@pytest.mark.parametrize("classes", [62, 100])
def test_many_classes_of_enough_rows(tmp_path, classes):
    assert len(load(tmp_path, np.resize(np.arange(classes), 5 * classes)).classes) == classes


def test_few_classes_of_few_rows(tmp_path):
    assert load(tmp_path, np.resize(np.arange(20), 25)).classes == tuple(map(str, range(20)))
    assert load(tmp_path, [0.5, 1, 1.5, 1, 0.5] * 9).classes == ("0.5", "1", "1.5")


@pytest.mark.parametrize("suffix", ["csv", "npz", "json"])
def test_classes_that_are_named_keep_their_order(tmp_path, suffix):
    """As a silo of a federation has them: few rows, of few of the classes."""
    classes = tuple(str(k) for k in reversed(range(62)))
    own = load(tmp_path, [3, 61, 0], suffix, classes=classes)
    assert own.classes == classes
    assert own.y.tolist() == [58, 0, 61]
    with pytest.raises(DataError, match=r"unknown class 62\. The classes are 61, 60"):
        load(tmp_path, [3, 62], suffix, classes=classes)


def test_white_space_and_case_of_names_are_said(tmp_path):
    own = load(tmp_path, ["benign", "benign ", " malignant", "Benign"] * 9)
    assert own.classes == ("Benign", "benign", "malignant")
    space, case = own.notes
    assert "'benign ' is read as 'benign'" in space
    assert case.endswith("Benign, benign differ only in upper and lower case, and are 2 classes")


def test_reading_alone_says_nothing(tmp_path):
    """Every process that has a part in a run reads the data: the run says notes once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path, ["benign", "benign "] * 9 + ["malignant"])
