"""Without a network: a plain message at once, or what was downloaded before."""

import re
import socket
import time

import numpy as np
import pytest

from fedbayes.data import DataSettings, load_dataset
from fedbayes.data.sources import hub
from fedbayes.errors import DataError
from tests.helpers.small_files import write_images


@pytest.fixture
def mute(monkeypatch):
    """A hub that takes connections and never answers."""
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "_PATIENCE", 0.2)
        yield


@pytest.mark.usefixtures("mute")
def test_a_hub_that_does_not_answer_is_given_up_at_once(tmp_path, capfd, monkeypatch):
    import datasets  # so that its import is not timed
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    began = time.monotonic()
    with pytest.raises(DataError) as error:
        load_dataset(DataSettings(name="mnist", dir=tmp_path))
    assert time.monotonic() - began < 2
    # The request's own time limit and ours run out together.
    assert re.search(r"does not answer|cannot be reached \(", str(error.value))
    for words in ("ylecun/mnist was not", "into a folder 'mnist'", "FEDBAYES"):
        assert words in str(error.value)
    assert str(tmp_path / "mnist") in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("offline", [False, True])
def test_what_was_downloaded_before_serves_without_a_network(tmp_path, capfd, monkeypatch, offline):
    import datasets
    from datasets.packaged_modules.parquet.parquet import Parquet

    files = {part: tmp_path / f"{part}.parquet" for part in ("train", "test")}
    pictures = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    for part, rows in (("train", slice(20)), ("test", slice(20, None))):
        write_images(files[part], pictures[rows], {"label": np.resize(np.arange(10), 30)[rows]})
    cache = tmp_path / "hub" / "ylecun___mnist"
    builder = Parquet(
        cache_dir=str(tmp_path / "hub"),
        dataset_name="mnist",
        repo_id="ylecun/mnist",
        config_name="mnist",
        hash="abc",
        data_files={part: str(file) for part, file in files.items()},
    )
    builder.download_and_prepare()
    next(cache.glob("mnist-*")).rename(cache / "mnist")
    capfd.readouterr()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    mnist = load_dataset(DataSettings(name="mnist"))
    assert np.array_equal(mnist.x[:, 0], pictures)
    assert capfd.readouterr() == ("", "")
