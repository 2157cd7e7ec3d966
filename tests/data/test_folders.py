"""Folders of pictures, and data of a function of one's own."""

import tracemalloc

import numpy as np
import pytest
from PIL import Image

from fedbayes.data import DataSettings, FederatedData, load_dataset, partition
from fedbayes.data.sources import spool
from fedbayes.errors import DataError


def pixels(number, shape=(6, 5, 3)):
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pictures"


def draw(folder, names, shape=(6, 5, 3)):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number, shape)).save(folder / name)


def load(folder, **settings):
    return load_dataset(DataSettings(path=folder, **settings))


def test_a_folder_for_each_class(folder):
    names = ["dog/b.png", "cat/a.png", "cat/c.bmp", "dog/d.png"]
    draw(folder, names)
    found = load(folder)
    assert found.classes == ("cat", "dog")
    assert found.shape == (3, 6, 5)
    assert found.y.tolist() == [0, 0, 1, 1]
    assert found.groups is None
    for row, number in enumerate((1, 2, 0, 3)):
        assert np.array_equal(found.x[row], pixels(number).transpose(2, 0, 1))
    draw(folder, ["cat/e.png"])
    assert load(folder).samples == 5  # what was decoded before is not taken for it


@pytest.mark.parametrize("pattern", ["{part}/{site}/{kind}", "{site}/{part}/{kind}"])
def test_clients_and_parts_above_the_classes(pattern, folder):
    names = [
        f"{pattern.format(site=site, part=part, kind=kind)}/{number}.png"
        for site in ("a", "b")
        for part in ("test", "train")
        for kind in ("1", "2", "10")
        for number in range(2 if part == "train" else 1)
    ]
    draw(folder, names)
    found = load(folder)
    assert found.classes == ("1", "2", "10")
    assert found.group_names == ("a", "b")
    assert found.official_train == 12
    assert found.samples == 18
    data = FederatedData(found, partition(found, DataSettings(path=folder), 0), 0)
    assert data.partition.names == ("a", "b")
    assert data.train_sizes().tolist() == [6, 6]
    assert data.test_sizes().tolist() == [3, 3]
    assert any("the upper one is read as the client" in note for note in found.notes)


def test_pictures_are_resized_or_cut_from_the_middle(folder):
    draw(folder, ["a/1.png", "b/2.png"], (8, 12, 3))
    squeezed, cut = load(folder, size="4,6"), load(folder, size="8", crop=True)
    image = Image.fromarray(pixels(0, (8, 12, 3))).resize((6, 4), Image.Resampling.BILINEAR)
    assert np.array_equal(squeezed.x[0], np.asarray(image).transpose(2, 0, 1))
    assert np.array_equal(cut.x[1], pixels(1, (8, 12, 3))[:, 2:10].transpose(2, 0, 1))


def test_grey_pictures_have_one_channel_unless_one_has_colour(folder):
    draw(folder, ["a/1.png", "b/2.png"], (6, 5))
    assert load(folder).shape == (1, 6, 5)
    draw(folder, ["b/3.png"])
    assert load(folder).shape == (3, 6, 5)


def damaged(folder):
    draw(folder, ["a/1.png", "b/2.png"])
    whole = (folder / "b/2.png").read_bytes()
    (folder / "b/2.png").write_bytes(whole[: len(whole) // 2])


def deep(folder):
    draw(folder, ["a/1.png", "b/2.png"])
    Image.fromarray(np.arange(30, dtype=np.uint16).reshape(6, 5) * 999).save(folder / "b/2.png")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (damaged, r"b/2\.png: .* Replace it"),
        (deep, r"b/2\.png has more than 8 bits"),
        (lambda f: draw(f, ["a/1.png", "2.png"]), r"2\.png is not in the folder of a class"),
        (lambda f: draw(f, ["a/b/c/d/1.png"]), "too deep"),
        (lambda f: draw(f, ["a/1.png", "x/a/2.png"]), "at different depths. Put all"),
        (lambda f: draw(f, ["train/a/1.png", "val/a/2.png"]), "in neither train nor test"),
        (lambda f: draw(f, ["test/a/1.png"]), "none in a folder train"),
        (lambda f: draw(f, ["a/1.png"]), "two classes"),
        (lambda f: (draw(f, ["a/1.png"]), draw(f, ["b/2.png"], (7, 5, 3))), r"2\.png is 3 x 7 x 5"),
    ],
)
def test_what_is_no_such_folder_is_refused_by_name(make, reason, tmp_path):
    make(tmp_path / "pictures")
    with pytest.raises(DataError, match=reason):
        load(tmp_path / "pictures")


def test_memory_is_for_a_few_pictures_at_a_time(folder, monkeypatch):
    monkeypatch.setattr("fedbayes.data.sources.folders.BATCH", 8)
    draw(folder, [f"{'ab'[n % 2]}/{n}.bmp" for n in range(120)], (120, 120, 3))
    tracemalloc.start()
    try:
        found = load(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Statistics take float64, of which a chunk is all of these pictures.
    assert found.x.nbytes == 120 * 120 * 120 * 3
    assert isinstance(found.x, np.memmap)
    assert peak < 30 * found.x.nbytes


def test_batches_become_one_array_on_disk():
    parts = [np.full((n, 2), n, np.float32) for n in (3, 1, 2)]
    found = spool.spool(iter(parts))
    assert isinstance(found, np.memmap)
    assert np.array_equal(found, np.concatenate(parts))
