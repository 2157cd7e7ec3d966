"""REPAIR: means and deviations of activations against those of the networks, on the same inputs."""

import pytest
import torch
from torch import nn

from fedbayes.fusion.combining import combine
from fedbayes.fusion.repair import repaired
from fedbayes.models import LeNet5

ALPHA = [0.5, 0.3, 0.2]
MAKES = {
    "dense": (
        lambda: nn.Sequential(
            *(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        ),
        (5,),
    ),
    "lenet": (lambda: LeNet5(1, 28, 28, 10), (1, 28, 28)),
    "groups": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(8 * 16, 4)),
        ),
        (2, 8, 8),
    ),
}


def outputs(network, x):
    """Of each layer before what follows, in evaluation mode."""
    found, network = {}, network.eval()
    handles = [
        layer.register_forward_hook(lambda _, __, said, name=name: found.update({name: said}))
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    with torch.no_grad():
        network(x)
    for handle in handles:
        handle.remove()
    return found


def told(said):
    """Mean and deviation of each unit."""
    rows = said.double().transpose(0, 1).flatten(1)
    return rows.mean(1), rows.std(1, unbiased=False)


@pytest.mark.parametrize("name", list(MAKES))
def test_means_and_deviations_are_the_networks_own_averaged(name):
    make, shape = MAKES[name]
    torch.manual_seed(0)
    networks, x = [make() for _ in range(3)], torch.randn(64, *shape)
    states = [network.state_dict() for network in networks]
    average = combine(states, ALPHA)
    found, left = repaired(networks[0], average, states, ALPHA, x)
    assert left == {}
    each = [outputs(network, x) for network in networks]
    fused = make()
    fused.load_state_dict(average)
    before = outputs(fused, x)
    fused.load_state_dict(found)
    after = outputs(fused, x)
    layers = list(after)
    for layer in layers[:-1]:
        own = [told(one[layer]) for one in each]
        for part in range(2):
            wanted = sum(a * one[part] for a, one in zip(ALPHA, own, strict=True))
            torch.testing.assert_close(told(after[layer])[part], wanted, atol=1e-4, rtol=1e-3)
        assert (told(before[layer])[1] - told(after[layer])[1]).abs().max() > 0.01
    for key in (f"{layers[-1]}.weight", f"{layers[-1]}.bias"):
        torch.testing.assert_close(found[key], average[key], rtol=0, atol=0)


def test_batch_normalization_gets_the_statistics_of_the_fused_network():
    torch.manual_seed(0)

    def make():
        return nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(4 * 36, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)),
        )

    networks, x = [make().eval() for _ in range(2)], torch.randn(40, 1, 8, 8)
    states = [network.state_dict() for network in networks]
    average = combine(states, [0.5, 0.5])
    found, left = repaired(networks[0], average, states, [0.5, 0.5], x)
    fused = make().eval()
    fused.load_state_dict(found)
    with torch.no_grad():
        rows = fused[0](x).transpose(0, 1).flatten(1)
    torch.testing.assert_close(fused[1].running_mean, rows.mean(1))
    torch.testing.assert_close(fused[1].running_var, rows.var(1))
    torch.testing.assert_close(found["0.weight"], average["0.weight"], rtol=0, atol=0)
    assert left == {"4": "it has no bias, so only its deviations were restored"}
    wanted = sum(told(outputs(network, x)["4"])[1] / 2 for network in networks)
    torch.testing.assert_close(told(outputs(fused, x)["4"])[1], wanted, atol=1e-4, rtol=1e-3)


def test_a_layer_that_is_used_twice_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.end(torch.relu(self.two(torch.relu(self.one(torch.relu(self.one(x)))))))

    torch.manual_seed(0)
    networks = [Twice() for _ in range(2)]
    states = [network.state_dict() for network in networks]
    average = combine(states, [0.5, 0.5])
    found, left = repaired(networks[0], average, states, [0.5, 0.5], torch.randn(30, 4))
    assert left == {"one": "it is used more than once"}
    torch.testing.assert_close(found["one.weight"], average["one.weight"], rtol=0, atol=0)
    assert (found["two.weight"] - average["two.weight"]).abs().max() > 1e-3


def test_units_that_never_vary_are_only_shifted():
    network = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    own = {
        n: torch.zeros_like(t) if n == "0.weight" else t for n, t in network.state_dict().items()
    }
    found, _ = repaired(network, own, [network.state_dict()], [1.0], torch.randn(20, 3))
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert (found["0.weight"] == 0).all()
