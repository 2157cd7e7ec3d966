import os
import subprocess
import sys
import time
from multiprocessing import get_context

import numpy as np
import pandas as pd
import pytest

from fedbayes.data import DataSettings, catalogue, load_dataset, plot_partition
from fedbayes.data import cache as cache_module
from fedbayes.data import dataset as dataset_module
from fedbayes.data.sources import images
from fedbayes.errors import DataError
from tests.helpers.small_files import write_images


@pytest.fixture
def mnist(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 20), ("test", 10)):
        pictures = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        y = np.resize(np.arange(10), n)
        write_images(tmp_path / "mnist" / f"{part}.parquet", pictures, {"label": y})
    return DataSettings(name="mnist", dir=tmp_path)


@pytest.fixture
def decodes(monkeypatch):
    """Counts the batches that are decoded."""
    seen = []
    real = images.decode_pictures

    def spy(*args):
        seen.append(1)
        return real(*args)

    monkeypatch.setattr(images, "decode_pictures", spy)
    return seen


def test_a_set_is_decoded_once(mnist, decodes, tmp_path):
    first = load_dataset(mnist)
    once = len(decodes)
    assert once > 0
    second = load_dataset(mnist)
    assert len(decodes) == once
    assert isinstance(second.x, np.memmap)
    assert not second.x.flags.writeable
    assert np.array_equal(first.x, second.x)
    assert first.classes == second.classes
    assert [file.name[:6] for file in (tmp_path / "cache").iterdir()] == ["mnist-"]


def test_a_changed_source_is_decoded_again(mnist, decodes, tmp_path):
    load_dataset(mnist)
    once = len(decodes)
    file = tmp_path / "mnist" / "test.parquet"
    os.utime(file, ns=(1, 1))
    load_dataset(mnist)
    assert len(decodes) == 2 * once


@pytest.mark.parametrize("file", ["x.npy", "y.npy", "dataset.json"])
def test_a_damaged_cache_is_decoded_again(mnist, tmp_path, file):
    before = np.array(load_dataset(mnist).x)
    (folder,) = (tmp_path / "cache").iterdir()
    kept = folder / file
    kept.write_bytes(kept.read_bytes()[:100])
    assert np.array_equal(load_dataset(mnist).x, before)
    assert kept.stat().st_size > 100


def test_a_decode_that_dies_leaves_nothing(mnist, tmp_path, monkeypatch):
    def dies(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_module.Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            load_dataset(mnist)
    assert not list((tmp_path / "cache").iterdir())
    assert load_dataset(mnist).samples == 30


def test_what_a_kill_left_is_swept(mnist, tmp_path):
    for name, age in ((".new-old", 7), (".new-young", 0)):
        folder = tmp_path / "cache" / name
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age * 86400,) * 2)
    load_dataset(mnist)
    names = {file.name for file in (tmp_path / "cache").iterdir()}
    assert ".new-young" in names
    assert ".new-old" not in names


def _load(settings, out):
    out.put(int(load_dataset(settings).x.sum()))


@pytest.mark.slow
def test_two_processes_may_race(mnist, tmp_path):
    context = get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=_load, args=(mnist, out)) for _ in range(2)]
    for process in processes:
        process.start()
    sums = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sums[0] == sums[1] == int(load_dataset(mnist).x.sum())
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_that_cannot_be_written(mnist, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="FEDBAYES_CACHE"):
        load_dataset(mnist)


def test_catalogue(mnist, tmp_path):
    entries = {entry.name: entry for entry in catalogue(tmp_path)}
    assert {name for name, entry in entries.items() if entry.available} == {
        "digits",
        "diabetes",
        "mnist",
        "permuted-mnist",
    }
    digits = load_dataset(DataSettings())
    assert entries["digits"].samples == digits.samples
    assert entries["digits"].shape == digits.shape
    assert not {entry.name for entry in catalogue() if entry.available} - {"digits", "diabetes"}


def test_importing_is_light():
    heavy = "datasets flwr_datasets pandas sklearn matplotlib PIL pyarrow rich scipy"
    code = f"import sys, fedbayes.data; print([m for m in '{heavy}'.split() if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("shape", [(10, 10), (200, 10), (5, 100)])
def test_plot(tmp_path, shape):
    from PIL import Image

    counts = np.random.default_rng(0).integers(0, 50, shape)
    counts[0] = 0
    plot_partition(counts, tmp_path / "plot.png", "$x_{$")  # no formula
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300
        assert len(np.unique(np.asarray(picture.convert("L")))) > 8


def own(file, **asked):
    return load_dataset(DataSettings(path=file, **asked))


def test_settings_of_reading_are_part_of_the_key(tmp_path):
    """Whatever a reader depends on: a changed setting is not answered from the cache."""
    file = tmp_path / "t.csv"
    rows = [f"{k},{-k},{'xyz'[k % 3]},{'uv'[k % 2]},{'pq'[k % 2]}" for k in range(30)]
    file.write_text("\n".join(["a,b,label,other,third", *rows]))
    left_out = {"drop": ("other", "third")}
    first = own(file, **left_out)
    named = own(file, **left_out, classes=("z", "y", "x"))
    assert named.classes == ("z", "y", "x")
    assert named.y.tolist() == [2 - k for k in first.y.tolist()]
    assert own(file, features=("b",)).features == ("b",)
    assert own(file, features=("b", "a")).features == ("b", "a")
    assert own(file, label="other", drop=("label", "third")).classes == ("u", "v")
    assert own(file, group="third", drop=("other",)).group_names == ("p", "q")
    assert len(list((tmp_path / "cache").iterdir())) == 6
    # How the rows are divided is no concern of the reader.
    own(file, **left_out, clients=3, partition="iid", test=0.5, limit=9)
    assert len(list((tmp_path / "cache").iterdir())) == 6


def test_the_digest_is_of_the_content(tmp_path, monkeypatch):
    frame = pd.DataFrame({"a": np.arange(30.0), "label": list("xyz") * 10, "g": list("pq") * 15})

    def digest(frame, name="t.csv", **asked):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        frame.to_csv(file, index=False)
        return own(file, group="g", **asked).digest

    whole = digest(frame)
    assert len(whole) == 64
    # The same content elsewhere, later, from the cache, or in another format.
    assert digest(frame, "moved/other.csv") == whole
    os.utime(tmp_path / "t.csv", ns=(1, 1))
    assert own(tmp_path / "t.csv", group="g").digest == whole
    frame.to_parquet(tmp_path / "t.parquet")
    assert own(tmp_path / "t.parquet", group="g").digest == whole
    kept = [own(tmp_path / "t.csv", group="g", clients=k).digest for k in (1, 2)]
    assert kept == [whole, whole]
    one_number, swapped = frame.copy(), frame.copy()
    one_number.loc[7, "a"] += 1e-3
    swapped.iloc[[3, 4]] = frame.iloc[[4, 3]].to_numpy()
    test = pd.concat([frame.assign(s="train")[:20], frame.assign(s="test")[20:]])
    changed = [
        digest(one_number),
        digest(swapped),
        digest(frame.replace({"label": {"x": "w"}})),
        digest(frame.replace({"label": {"x": "y", "y": "x"}})),
        digest(frame.replace({"g": {"p": "r"}})),
        digest(frame.rename(columns={"a": "b"})),
        digest(frame, classes=("x", "y", "z", "w")),
        digest(test, split="s"),
    ]
    assert len({whole, *changed}) == 1 + len(changed)


def test_the_digest_is_kept_with_the_decoded_copy(mnist, monkeypatch):
    first = load_dataset(mnist).digest
    monkeypatch.setattr(dataset_module, "_digest", None)
    assert load_dataset(mnist).digest == first
