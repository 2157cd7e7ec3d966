"""Matching of whole networks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.errors import ModelError
from fedbayes.matching import MatchingSettings, match_networks
from fedbayes.matching.network import _Networks
from tests.helpers.dense_networks import forward, permuted, random_network, written_out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [[6, 9, 4], [6, 9, 8, 4], [5, 7, 6, 8, 3]])
@pytest.mark.parametrize("alternations", [0, 4])
def test_permuted_copies_fuse_to_the_network(widths, bias, alternations):
    rng = np.random.default_rng(sum(widths))
    network = random_network(rng, widths, bias)
    copies = [permuted(network, rng) for _ in range(5)]
    settings = MatchingSettings(
        sigma=0.3, sigma0=1000.0, epsilon=0.0, bias_mean=0.1, alternations=alternations
    )
    # A prior of no precision makes new atoms free but for their number; γ0 keeps them away.
    fused = match_networks(copies, settings.model_copy(update={"gamma": 1e-200})).network
    assert fused.widths == widths
    x = rng.normal(0, 1, (50, widths[0]))
    np.testing.assert_allclose(forward(fused, x), forward(network, x), rtol=1e-3, atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    epsilon=st.sampled_from([0.0, 0.5]),
    depth=st.integers(1, 3),
    bias=st.booleans(),
    gamma=st.sampled_from([0.5, 5.0]),
)
def test_alternating_never_raises_the_objective(seed, epsilon, depth, bias, gamma):
    rng = np.random.default_rng(seed)
    networks = [random_network(rng, [4, *rng.integers(2, 6, depth), 3], bias) for _ in range(4)]
    counts = rng.integers(0, 20, (4, 3)).astype(float)
    settings = MatchingSettings(epsilon=epsilon, gamma=gamma, alternations=6, bias_mean=0.1)
    result = match_networks(networks, settings, counts=counts, seed=seed)
    values = np.array(result.objective)
    assert (np.diff(values) <= 1e-9 * np.abs(values).max()).all()
    brute = written_out(networks, result.layers, settings, counts)
    assert values[-1] == pytest.approx(brute, rel=1e-9, abs=1e-7)


def test_top_down_weights_are_posterior_means():
    """The assembled network holds the layers' own atoms, Eq. 5."""
    rng = np.random.default_rng(1)
    networks = [random_network(rng, [5, 4, 6, 3]) for _ in range(3)]
    settings = MatchingSettings(bias_mean=0.1, sigma0=2.0)
    result = match_networks(networks, settings, counts=rng.integers(1, 9, (3, 3)).astype(float))
    lower, upper = result.layers
    net = result.network
    np.testing.assert_allclose(upper.atoms, np.hstack([net.biases[1][:, None], net.weights[2].T]))
    np.testing.assert_allclose(
        lower.atoms, np.hstack([net.weights[0], net.biases[0][:, None], net.weights[1].T])
    )


def test_output_biases_are_weighted_by_class_share():
    rng = np.random.default_rng(2)
    networks = [random_network(rng, [5, 4, 2]) for _ in range(2)]
    counts = np.array([[10.0, 0.0], [30.0, 5.0]])
    fused = match_networks(networks, MatchingSettings(), counts=counts).network
    one, two = networks[0].biases[1], networks[1].biases[1]
    np.testing.assert_allclose(fused.biases[1], [0.25 * one[0] + 0.75 * two[0], two[1]])


def test_a_client_without_a_class_says_nothing_of_it():
    """What it would predict for that class changes no outgoing weight."""
    rng = np.random.default_rng(4)
    networks = [random_network(rng, [5, 4, 3]) for _ in range(3)]
    counts = np.array([[5.0, 5, 0], [5, 5, 5], [5, 5, 5]])
    before = match_networks(networks, MatchingSettings(), counts=counts)
    networks[0].weights[1][2] = 100.0
    after = match_networks(networks, MatchingSettings(), counts=counts)
    for one, two in zip(before.network.weights, after.network.weights, strict=True):
        np.testing.assert_allclose(one, two)


@pytest.mark.parametrize("widths", [[6, 5, 3], [6, 5, 4, 3]])
def test_without_any_match_logits_are_those_of_the_ensemble(widths):
    """By class share, to the last bit of it: nothing is lost by fusing."""
    rng = np.random.default_rng(8)
    networks = [random_network(rng, widths) for _ in range(3)]
    counts = rng.integers(1, 20, (3, 3)).astype(float)
    apart = MatchingSettings(gamma=1e200, epsilon=0.0, alternations=2)
    fused = match_networks(networks, apart, counts=counts).network
    assert fused.widths == [6, *(3 * w for w in widths[1:-1]), 3]
    x = rng.normal(0, 1, (40, 6))
    shares = counts / counts.sum(0)
    wanted = sum(s * forward(n, x) for s, n in zip(shares, networks, strict=True))
    np.testing.assert_allclose(forward(fused, x), wanted, rtol=1e-9)


def test_more_starts_are_not_worse():
    rng = np.random.default_rng(5)
    networks = [random_network(rng, [6, 8, 8, 3]) for _ in range(4)]
    one = match_networks(networks, MatchingSettings(alternations=5, starts=1))
    many = match_networks(networks, MatchingSettings(alternations=5, starts=4))
    assert many.objective[-1] <= one.objective[-1]


def test_what_does_not_fit_is_named():
    rng = np.random.default_rng(6)
    good = random_network(rng, [5, 4, 3])
    cases = [
        ([good, random_network(rng, [5, 4, 4, 3])], None, "b has 3 layers and a has 2"),
        ([good, random_network(rng, [6, 4, 3])], None, "b has 6 inputs"),
        ([good, random_network(rng, [5, 4, 2])], None, "b has 2 outputs"),
        ([good, random_network(rng, [5, 4, 3], bias=False)], None, "biases"),
        ([random_network(rng, [5, 3])] * 2, None, "no hidden layer"),
        ([good, random_network(rng, [5, 0, 3])], None, "without neurons"),
        ([good, good], np.ones((2, 4)), "counts have shape"),
        ([good, good], -np.ones((2, 3)), "at least 0"),
    ]
    for networks, counts, words in cases:
        with pytest.raises(ModelError, match=words):
            match_networks(networks, MatchingSettings(), counts=counts, names=["a", "b"])
    with pytest.raises(ModelError, match="no networks"):
        match_networks([], MatchingSettings())


def test_layers_of_clients_may_differ_in_width():
    rng = np.random.default_rng(7)
    networks = [random_network(rng, [5, n, m, 3]) for n, m in ((4, 6), (7, 2), (1, 9))]
    work = _Networks(networks, MatchingSettings(), None)
    matched = work.top_down(rng, lambda _: None)
    for depth, layer in enumerate(matched.layers):
        for network, places in zip(networks, layer.assignments, strict=True):
            assert len(places) == len(network.weights[depth])
