"""What a client's problem is made of lies on the network's device, from its first round on.

The device is `meta`, which any machine has: what stays on the CPU beside it fails as beside a GPU.
"""

import pytest
import torch

from fedbayes.contracts import factors, moments
from fedbayes.core.messages import dense
from fedbayes.core.tensors import Samples, pack, to, unpack
from fedbayes.methods import METHODS, ivon_admm
from tests.helpers.places import at, network, run_of

META = torch.device("meta")
LOOK = ("combined", "fedfuse", "qfedavg")
"""Methods that look at values where they state a problem, and `meta` has none."""
ELSEWHERE = ("global", "gpi-fnm", "pfnm")


def tensors_in(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_in(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for key, value in enumerate(tree):
            yield from tensors_in(value, f"{path}/{key}")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in sorted(METHODS) if name not in (*LOOK, *ELSEWHERE)),
        ("fedlap", {"covariance": "none"}),
        ("ivon-admm", {"rate": 0.0}),
    ],
)
def test_a_first_problem_is_on_the_device(name, settings, monkeypatch):
    for module in (moments, factors, ivon_admm):
        monkeypatch.setattr(module, "is_unlearnt", lambda mean: True)
    net = network(hidden=(5,))
    run = run_of(net)
    method = METHODS[name](**settings).variant()
    place = at(run, 0, 1)
    message = {n: t.to(META) for n, t in dense(method.message(method.init(run), place)).items()}
    joined = method.join(place)
    state = unpack(type(joined), to(pack(joined), META))
    data = Samples(torch.empty(12, 4, device=META), torch.zeros(12, dtype=torch.int64, device=META))
    monkeypatch.setattr(net, "_channels_last", False)
    monkeypatch.setattr(net, "device", META)
    problem = method.problem(message, state, data, place)
    left = [
        where
        for where, tensor in tensors_in({"start": problem.start, "given": problem.given})
        if tensor.device.type == "cpu" and tensor.ndim
    ]
    assert not left
