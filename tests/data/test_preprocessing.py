"""From raw samples to what a network sees, against NumPy."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch

from fedbayes.core.targets import Target
from fedbayes.data import DataSettings, FederatedData, Preprocessing, load_dataset, partition
from fedbayes.data.dataset import build_dataset
from fedbayes.data.tables.columns import Column
from fedbayes.errors import DataError, FedbayesWarning
from tests.helpers.small_files import pool

TABLE = Preprocessing(
    shape=(2,),
    scale=1.0,
    mean=(3.0, -1.0),
    std=(2.0, 0.5),
    target=Target("class", ("no", "yes")),
    features=("age", "dose"),
)
RAW = np.array([[1.0, np.nan], [5.0, -2.0], [np.nan, 0.0]])
SEEN = torch.tensor([[-1.0, 0.0], [1.0, -2.0], [0.0, 2.0]])


@pytest.mark.parametrize("kind", [np.float64, np.float32, torch.from_numpy])
def test_arrays_and_tensors(kind):
    raw = kind(RAW) if kind is torch.from_numpy else RAW.astype(kind)
    assert torch.equal(TABLE.apply(raw), SEEN)
    assert torch.equal(TABLE.module()(torch.as_tensor(raw)), SEEN)
    np.testing.assert_array_equal(np.asarray(raw), RAW.astype(np.asarray(raw).dtype))


def test_samples_are_restored_from_what_a_network_sees():
    torch.testing.assert_close(
        TABLE.restored(SEEN[:2, :1].repeat(1, 2)), torch.tensor([[1.0, -1.5], [5, -0.5]])
    )
    photos = Preprocessing(
        shape=(3, 2, 2), scale=255.0, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7),
        target=Target("class", ("no", "yes")), bounds=(0.0, 255.0),
    )  # fmt: skip
    raw = torch.randint(256, (5, 3, 2, 2)).float()
    raw[0, 0] = 255.0
    found = photos.restored(photos.apply(raw))
    torch.testing.assert_close(found, raw, rtol=0, atol=1e-3)
    assert found.max() <= 255, "else a program rejects them"


def test_a_table_is_taken_by_the_names_of_its_columns():
    frame = pd.DataFrame(RAW, columns=["age", "dose"])
    frame["hospital"] = ["a", "b", "c"]
    assert torch.equal(TABLE.apply(frame[["hospital", "dose", "age"]]), SEEN)
    assert torch.equal(TABLE.apply(frame.convert_dtypes()), SEEN)
    with pytest.raises(DataError, match="no column 'dose'"):
        TABLE.apply(frame[["age"]])
    with pytest.raises(DataError, match=r"'age' has .* not "):
        TABLE.apply(frame.assign(age="old"))
    with pytest.raises(DataError, match="infinite"):
        TABLE.apply(frame.assign(age=np.inf))
    with pytest.raises(DataError, match=r"shape \(3, 3\).*DataFrame"):
        TABLE.apply(np.ones((3, 3)))


@pytest.mark.parametrize(
    ("dose", "told"),
    [(1.0, ""), (100.0, "'dose'"), (0.001, "'dose'"), (0.0, "'dose'")],
    ids=["the same units", "larger numbers", "smaller numbers", "all zero"],
)
def test_rows_in_other_units_are_noticed(dose, told):
    seen = dataclasses.replace(TABLE, mean=(3.0, -2.0))
    rows = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([2, 0.5])
    rows = (rows + torch.tensor([3.0, -2.0])) * torch.tensor([1.0, dose])
    rows[0] = torch.nan
    found = seen.other_units(rows)
    assert (told in found) if told else not found
    assert "'age'" not in found
    assert not seen.other_units(rows[1:20].repeat(9, 1)), "of so few rows"
    plain = dataclasses.replace(seen, mean=(0.0, 0.0), std=(1.0, 1.0))
    assert not plain.other_units(100 * rows), "rows that were not standardized have no units"


@pytest.mark.parametrize(
    ("trained", "kind", "new"),
    [
        ((1000.0, 1000.0), "date", (2900.0, 10.0)),
        ((5.0, 1.0), "number", (5.0, 0.001)),
        ((49.5, 29.0), "number", (7.5, 0.5)),
        ((1100.0, 10_000.0), "number", (50.0, 10.0)),
    ],
    ids=["a new month", "a constant", "two of many sites", "numbers beside sentinels"],
)
def test_rows_of_a_narrow_part_of_the_training_are_not(trained, kind, new):
    seen = dataclasses.replace(
        TABLE, shape=(1,), mean=trained[:1], std=trained[1:], features=("x",),
        columns=(Column("x", kind),),
    )  # fmt: skip
    rows = torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    assert not seen.other_units(new[0] + new[1] * rows)


def test_blanks_around_names_of_columns_do_not_count_as_in_a_file():
    frame = pd.DataFrame(RAW, columns=[" age", "dose \t"])
    assert torch.equal(TABLE.apply(frame), SEEN)
    with pytest.raises(DataError, match="two columns with the same name"):
        TABLE.apply(frame.assign(age=1.0))
    blank = dataclasses.replace(TABLE, features=("age ", "dose"))  # the model's own, as of an array
    frame.columns = pd.Index(["age ", " dose"])
    assert torch.equal(blank.apply(frame), SEEN)


@pytest.mark.parametrize("kind", [list, lambda rows: np.array(rows, dtype=object)])
def test_rows_of_several_lengths_are_told(kind):
    with pytest.raises(DataError, match=r"invalid samples|different shapes"):
        TABLE.apply(kind([[1.0, 2.0], [3.0]]))
    assert TABLE.apply([[1.0, -1.0], [3.0, -1.0]]).tolist() == [[-1.0, 0.0], [0.0, 0.0]]


def test_what_clients_see_is_what_is_applied():
    images = build_dataset(
        "toy",
        np.random.default_rng(0).integers(0, 256, (90, 3, 5, 4), dtype=np.uint8),
        np.arange(90) % 3,
        tuple("abc"),
        scale=255.0,
    )
    base = pool(np.resize([0, 1], 200), width=3)
    x = np.where(np.random.default_rng(1).random(base.x.shape) < 0.2, np.nan, base.x)
    table = build_dataset("t", x.astype(np.float32), base.y, base.classes, features=("a", "b", "c"))
    for dataset in (images, table, load_dataset(DataSettings())):
        settings = DataSettings(clients=4, partition="iid")
        data = FederatedData(dataset, partition(dataset, settings, 0), 0)
        stored = Preprocessing.load(data.preprocessing.dump())
        assert stored == data.preprocessing
        raw = data.raw_test(0, data.test_total)
        seen = data.test_union(0, data.test_total).x
        assert torch.equal(stored.apply(raw), seen)
        assert torch.equal(stored.apply(raw.flatten(1)), seen)
        assert torch.equal(stored.module()(raw), seen)
        again = FederatedData(dataset, data.partition, 0, stored.statistics)
        assert torch.equal(again.test_union(0, data.test_total).x, seen)


def test_pixels_that_were_scaled_already_are_noticed():
    image = dataclasses.replace(
        TABLE, shape=(1, 2, 2), scale=255.0, mean=(0.5,), std=(0.1,), features=()
    )
    expected = torch.full((3, 1, 2, 2), (128 / 255 - 0.5) / 0.1)
    torch.testing.assert_close(image.apply(torch.full((3, 2, 2), 128)), expected)
    with pytest.warns(FedbayesWarning, match="have values up to 255"):
        image.apply(torch.full((3, 1, 2, 2), 0.5))
    with pytest.raises(DataError, match="expects"):
        image.apply(torch.ones(3, 2, 1, 2))
    order = np.array([3, 1, 0, 2])
    x = torch.randint(256, (5, 1, 2, 2))
    assert torch.equal(image.module(order)(x).flatten(1), image.apply(x).flatten(1)[:, order])


@pytest.mark.parametrize("content", ["", "[]", '{"shape": [3]}', "null"])
def test_what_is_no_preprocessing_is_told(content):
    with pytest.raises(DataError, match="invalid preprocessing"):
        Preprocessing.load(content)
    broken = TABLE.dump().replace(b"-1.0", b"")
    with pytest.raises(DataError, match="invalid preprocessing"):
        Preprocessing.load(broken)


def test_pixels_of_8_bits_are_those_of_images_from_0_to_1():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 1, 4, 4), np.uint8)
    one = Preprocessing((1, 4, 4), 1.0, (0.5,), (0.25,), Target("class", ("a", "b")))
    unit = dataclasses.replace(one, bounds=(0.0, 1.0))
    torch.testing.assert_close(unit.raw(pixels), torch.from_numpy(pixels / np.float32(255)))
    torch.testing.assert_close(unit.apply(pixels), (unit.raw(pixels) - 0.5) / 0.25)
    torch.testing.assert_close(one.raw(pixels), torch.from_numpy(pixels))
