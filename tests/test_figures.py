"""Figures that the README states, on real data."""

from pathlib import Path

import pytest

import fedbayes
from fedbayes import Config

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.data
def test_fedavg_on_mnist_iid(tmp_path):
    config = Config.load(ROOT / "benchmarks" / "mnist_iid.toml")
    run = fedbayes.run(config, tmp_path)
    assert config.rounds == 20
    assert run.summary["global_accuracy"] > 0.955
