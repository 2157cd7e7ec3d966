"""Arrays, tensors and tables as samples: their shape decides, and not their type."""

import sys
import types
import unicodedata
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from fedbayes.config.config import Config
from fedbayes.data import DataSettings, load_dataset
from fedbayes.data.intake import Narrowing, arrange, channels_of
from fedbayes.errors import DataError, ModelError
from fedbayes.runs.build import build_data, stored_data
from fedbayes.runs.simulation import Simulation

RNG = np.random.default_rng(8)
NAMES = ("a", "b", "c")


class Embedded(torch.nn.Module):
    """Ids in the first two features, quantities in the others."""

    def __init__(self, ids: int, others: int, rows: int = 50) -> None:
        super().__init__()
        self.ids, self.embedding = ids, torch.nn.Embedding(rows, 4)
        self.last = torch.nn.Linear(4 * ids + others, 2)

    def forward(self, x):
        known = self.embedding(x[:, : self.ids].long()).flatten(1)
        return self.last(torch.cat([known, torch.tanh(x[:, self.ids :])], 1))


@pytest.fixture
def module(monkeypatch):
    """A module of the user's own, in which tests put functions."""
    own = types.ModuleType("own_intake")
    own.all_ids = lambda shape, classes: Embedded(shape[0], 0)
    own.some_ids = lambda shape, classes: Embedded(2, shape[0] - 2)
    own.few_rows = lambda shape, classes: Embedded(shape[0], 0, rows=9)
    own.plain = lambda shape, classes: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(int(np.prod(shape)), 2), torch.nn.Tanh()
    )
    own.squares = lambda shape, classes: torch.nn.LSTM(28, 2)
    monkeypatch.setitem(sys.modules, "own_intake", own)
    return own


def clients(make, count=3, rows=20):
    labels = [np.arange(rows) % 2 for _ in range(count)]
    return {f"c{k}": (make(rows), labels[k]) for k in range(count)}


def load(module, made, **asked):
    module.data = lambda: made
    return load_dataset(DataSettings(name="own_intake:data", **asked))


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32, np.float64])
@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((28, 28), (1, 28, 28)),
        ((24, 32), (1, 24, 32)),
        ((28, 28, 3), (3, 28, 28)),
        ((20, 30, 4), (4, 20, 30)),
        ((28, 28, 10), (10, 28, 28)),
        ((3, 28, 28), (3, 28, 28)),
        ((4, 20), (4, 20)),
        ((24, 17), (24, 17)),
        ((9, 128), (9, 128)),
        ((5,), (5,)),
    ],
)
def test_the_shape_decides_and_not_the_type(module, tmp_path, kind, shape, seen):
    made = clients(lambda n: RNG.integers(0, 200, (n, *shape)).astype(kind))
    own = load(module, made)
    assert own.shape == seen
    assert own.scale == (255 if kind == np.uint8 and len(seen) == 3 else 1)
    assert any("data.channels" in note for note in own.notes) == (seen != shape)
    x = np.concatenate([x for x, _ in made.values()])
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(len(x)) % 2)
    npz = load_dataset(DataSettings(path=tmp_path / "a.npz"))
    np.testing.assert_array_equal(npz.x, own.x)
    assert load(module, made, channels="first").shape == shape
    moved = np.moveaxis(x, -1, 1) if channels_of(shape) == "last" else x
    np.testing.assert_array_equal(own.x.reshape(moved.shape), moved)


def test_channels_that_are_not_there():
    with pytest.raises(DataError, match=r"data\.channels is 'last', which needs samples of 3 axes"):
        arrange(np.zeros((4, 6, 6)), "last", "x")
    x, note = arrange(np.zeros((4, 5, 30)), "absent", "x")
    assert (x.shape, note) == ((4, 1, 5, 30), "")


def test_a_network_for_images_names_a_missing_channel(module):
    module.data = lambda: clients(lambda n: RNG.random((n, 16, 64)))
    config = Config.create(data={"name": "own_intake:data"}, model={"name": "lenet5"})
    with pytest.raises(ModelError, match=r"without a channel, set data\.channels to 'absent'"):
        Simulation(config)


def test_digits_that_float32_loses_are_told_by_all_sources(module, tmp_path):
    def wide(n):
        x = RNG.normal(size=(n, 3))
        x[:, 1] = 1e9 + 1e-3 * x[:, 1]
        return x

    made = clients(wide)
    (note,) = load(module, made).notes
    assert "feature 1 is rounded to" in note
    x = np.concatenate([x for x, _ in made.values()])
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(len(x)) % 2)
    assert "feature 1 is rounded" in load_dataset(DataSettings(path=tmp_path / "a.npz")).notes[0]
    frames = {k: (pd.DataFrame(x, columns=NAMES), y) for k, (x, y) in made.items()}
    assert "'b' is rounded to" in load(module, frames).notes[0]


def test_what_is_lost_is_that_of_all_batches_together():
    x = RNG.normal(size=(50, 2, 7)) * [[1], [1e-3]] + [[0], [1e6]]
    parts = Narrowing()
    for part in np.array_split(x, 7):
        np.testing.assert_array_equal(parts.add(part), part.astype(np.float32))
    std = x.std((0, 2))
    error = np.abs(x.astype(np.float32) - x).max((0, 2))
    np.testing.assert_allclose(np.sqrt(parts._squares / parts._count), std, rtol=1e-6)
    np.testing.assert_allclose(parts._error, error)
    assert "feature 1 is" in parts.notes((), "x")[0]


def test_frames_with_columns_of_any_type(module):
    x = RNG.integers(0, 5, (20, 3)).astype(float)
    x[4, 0] = np.nan
    frame = pd.DataFrame(x, columns=NAMES)
    y = np.arange(20) % 2
    series = pd.Series(y, index=range(100, 120))
    forms = {
        "plain": (frame, series),
        "nullable": (frame.convert_dtypes(), series.astype("Int64")),
        "arrow": (frame.convert_dtypes(dtype_backend="pyarrow"), series),
        "ordered": (frame[["c", "a", "b"]], series),
        "arrays": {"train": (frame, y)},
    }
    own = load(module, forms)
    assert own.features == NAMES
    np.testing.assert_array_equal(own.x, np.concatenate([x] * 5).astype(np.float32))
    whole = {"c": frame.assign(label=y)}
    np.testing.assert_array_equal(load(module, whole).x, x.astype(np.float32))
    mixed = load(module, {"a": (frame, y), "b": (x, y)})
    assert mixed.features == ()
    numbered = {"a": (frame.set_axis([0, 1, 2], axis=1), y)}
    assert load(module, numbered).features == ("0", "1", "2")
    for odd, words in (
        (
            {"a": (frame, y), "b": (frame.rename(columns={"c": "d"}), y)},
            "column 'c' is missing from a client's table, unlike in",
        ),
        (
            {"a": (frame.assign(sex="f"), y)},
            r"'sex' has .* cells that are not numbers \(first 'f' in row 1",
        ),
        ({"a": frame}, "no column 'label'. Set data.label to one of a, b, c"),
    ):
        with pytest.raises(DataError, match=words):
            load(module, odd)


def test_clients_without_samples_or_values_are_named(module):
    made = clients(lambda n: RNG.normal(size=(n, 3)))
    made["none"] = (np.zeros((0, 3)), np.zeros(0, int))
    assert "'none' has no training samples and is left out" in load(module, made).notes[0]
    made["blank"] = (np.full((20, 3), np.nan), np.arange(20) % 2)
    module.data = lambda: made
    with pytest.raises(DataError, match="the training samples of client 'blank' have only"):
        build_data(Config.create(data={"name": "own_intake:data"}))


def test_one_name_in_two_forms_of_unicode_is_one_client(tmp_path):
    names = [unicodedata.normalize(form, "Köln") for form in ("NFC", "NFD")]
    frame = pd.DataFrame({"a": RNG.normal(size=20), "site": names * 10, "label": list("xy") * 10})
    frame.to_csv(tmp_path / "t.csv", index=False)
    own = load_dataset(DataSettings(path=tmp_path / "t.csv", group="site"))
    assert own.group_names == (names[0],)
    frame = frame.rename(columns={"a": names[1]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    own = load_dataset(DataSettings(path=tmp_path / "t.csv", features=(names[1],)))
    assert own.features == (names[0],)


def federated(module, make, network, **asked):
    module.data = lambda: clients(make)
    data = {"name": "own_intake:data", **asked}
    config = Config.create(data=data, model={"name": f"own_intake:{network}"})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        return build_data(config), [str(one.message) for one in told]


@pytest.mark.parametrize("kind", [np.int64, np.float64, np.uint8, pd.DataFrame])
def test_ids_reach_an_embedding_as_they_are(module, kind):
    def make(n):
        ids = RNG.integers(0, 50, (n, 6))
        return pd.DataFrame(ids) if kind is pd.DataFrame else ids.astype(kind)

    data, told = federated(module, make, "all_ids")
    assert set(np.unique(data.all_train().x)) <= set(range(50))
    assert any("uses samples as ids" in note for note in told)
    example = data.preprocessing.example(40, torch.Generator().manual_seed(0))
    assert bool((example == example.round()).all())
    assert 0 <= example.min() <= example.max() < 50
    data, told = federated(module, make, "all_ids", standardize="on")
    assert data.all_train().x.min() < 0


def test_ids_next_to_quantities(module):
    def make(n):
        whole = RNG.integers(0, 50, (n, 3))  # the third are ages, which the network sees as numbers
        return np.concatenate([whole, RNG.normal(5, 2, (n, 1))], 1)

    data, told = federated(module, make, "some_ids")
    assert data.preprocessing.ids[2:] == (-1, -1)
    assert data.mean[:2].tolist() == [0, 0]
    assert data.mean[2:].min() > 1
    assert any("feature 0, feature 1 as ids" in note for note in told)


def test_whole_numbers_that_are_no_ids_are_standardized_with_a_note(module):
    data, told = federated(module, lambda n: RNG.integers(0, 900, (n, 4)), "plain")
    assert data.mean.min() > 1
    assert any("does not use as ids" in note for note in told)
    data, told = federated(
        module, lambda n: RNG.integers(0, 900, (n, 4)), "plain", standardize="off"
    )
    assert data.mean.tolist() == [0] * 4
    assert data.std.tolist() == [1] * 4


@pytest.mark.parametrize("squash", [torch.nn.Tanh(), torch.nn.ReLU(), torch.nn.Hardtanh()])
def test_flat_units_do_not_make_ids_of_numbers(module, squash):
    """Units that are off or saturated have no gradient at large numbers."""
    module.plain = lambda shape, classes: torch.nn.Sequential(
        torch.nn.Linear(shape[0], 2), squash, torch.nn.Linear(2, classes)
    )
    rng = np.random.default_rng(0)
    for _ in range(60):
        data, _ = federated(module, lambda n: rng.integers(0, 900, (n, 4)), "plain")
        assert data.mean.min() > 1


def test_ids_beyond_an_embedding_are_an_error_before_the_first_round(module):
    with pytest.raises(
        DataError,
        match=r"ids up to 49 .* 9 rows\. .* ids of 0 or more",
    ):
        federated(module, lambda n: np.tile(np.arange(30, 50)[:, None], (1, 3)), "few_rows")


def test_ids_are_kept_where_a_run_goes_on(module, tmp_path):
    module.data = lambda: clients(lambda n: RNG.integers(0, 50, (n, 6)))
    made = module.data()
    module.data = lambda: made
    config = Config.create(
        data={"name": "own_intake:data"}, model={"name": "own_intake:all_ids"}, rounds=1
    )
    simulation = Simulation(config, tmp_path / "run")
    simulation.close()
    before = simulation.data.preprocessing
    assert before.ids
    assert stored_data(config, simulation.folder).preprocessing == before
