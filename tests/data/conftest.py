import os

import pytest

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
