import os
from io import BytesIO

import numpy as np
import pytest

from fedbayes.data.dataset import build_dataset

REAL = os.environ.get("FEDBAYES_DATA")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Every test decodes into a cache of its own and sees no data folder but what it names."""
    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDBAYES_DATA", raising=False)


@pytest.fixture(scope="session")
def _shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("decoded")


@pytest.fixture
def real(monkeypatch, _own_cache, _shared_cache):
    """The real data, decoded once for all tests."""
    if not REAL:
        pytest.skip("FEDBAYES_DATA names no folder with real data")
    monkeypatch.setenv("FEDBAYES_DATA", REAL)
    monkeypatch.setenv("FEDBAYES_CACHE", str(_shared_cache))


@pytest.fixture
def no_hub(monkeypatch):
    """The hub is out of reach, at once."""
    import datasets

    reached = datasets.load_dataset

    def load(name, *args, **kwargs):
        if name != "parquet":
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub")
        return reached(name, *args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", load)


def encode(picture, form="PNG"):
    """Bytes of a picture [H, W] or [H, W, 3]."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(picture).save(file, form)
    return file.getvalue()


def write_images(file, pictures, columns, image="image"):
    """A Parquet file with pictures as the hub stores them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": encode(picture), "path": None} for picture in pictures]
    pq.write_table(pa.table({image: cells, **columns}), file)


def pool(y, *, official=None, groups=None, width=3, seed=0):
    """A table with these labels; the first feature of a row is its number."""
    y = np.asarray(y)
    x = np.random.default_rng(seed).normal(size=(len(y), width)).astype(np.float32)
    x[:, 0] = np.arange(len(y))
    names = () if groups is None else tuple(f"g{k}" for k in range(int(np.max(groups)) + 1))
    return build_dataset(
        "pool",
        x,
        y,
        tuple(str(k) for k in range(int(y.max()) + 1)),
        official_train=official,
        groups=None if groups is None else np.asarray(groups),
        group_names=names,
    )
