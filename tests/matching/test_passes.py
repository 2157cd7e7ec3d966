"""What passes over whole networks do, against the objective and posterior means written out."""

from dataclasses import replace

import numpy as np
import pytest

from fedbayes.matching import MatchingSettings, match_networks, network
from fedbayes.matching import passes as descent
from tests.helpers.dense_networks import forward, permuted, random_network, written_out

# No deviation is 1, so that none can be left out or squared once too often.
UNEVEN = MatchingSettings(sigma=0.6, sigma0=1.7, bias_mean=1.5, gamma=3.0)


def clients(rng, widths, bias=True, count=4):
    """Networks that share some neurons and class counts of which some are zero."""
    base = random_network(rng, widths, bias)
    networks = []
    for _ in range(count):
        own = permuted(base, rng)
        weights = [w + rng.normal(0, 0.4, w.shape) for w in own.weights]
        networks.append(replace(own, weights=weights))
    return networks, rng.integers(0, 9, (count, widths[-1])).astype(float) + np.eye(count)[:, -1:]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [[5, 6, 3], [4, 5, 6, 3], [4, 3, 5, 4, 3]])
def test_a_layers_objective_falls_by_what_the_networks_does(widths, bias, monkeypatch):
    """Given the other layers, the two differ by a constant."""
    rng = np.random.default_rng(sum(widths))
    networks, counts = clients(rng, widths, bias)
    falls = []
    real = network._Networks.match

    def match(work, depth, layers, rng, joint):
        matched = real(work, depth, layers, rng, joint)
        if joint:
            before, after = list(layers), list(layers)
            after[depth] = matched
            fall = work.value(before) - work.value(after)
            falls.append(fall)
            assert matched.objective[0] - matched.objective[-1] == pytest.approx(fall, abs=1e-7)
            assert len(matched.objective) == 2  # one sweep
        return matched

    monkeypatch.setattr(network._Networks, "match", match)
    settings = UNEVEN.model_copy(update={"alternations": 20, "start_gamma": 30.0})
    result = match_networks(networks, settings, counts=counts)
    assert max(falls) > 0
    values = np.array(result.objective)
    assert (np.diff(values)[:-1] < 0).all()
    assert values[-1] == pytest.approx(values[-2], rel=1e-6)
    assert len(values) < 21
    assert values[-1] == pytest.approx(written_out(networks, result.layers, settings, counts))


@pytest.mark.parametrize("alternations", [0, 1])
@pytest.mark.parametrize("widths", [[5, 4, 3], [4, 5, 6, 3]])
def test_fused_weights_are_written_out_means(widths, alternations):
    """Top down, posterior means with zeros between a neuron and those that its client lacks;
    alternating, means over the clients that own both ends, and sums by share at the outputs.
    """
    rng = np.random.default_rng(3)
    networks, counts = clients(rng, widths)
    # A class that nobody saw says nothing of anybody; of another there is one sample in all.
    counts[:, 0], counts[:, 1] = 0.0, [0.0, 1.0, 0.0, 0.0]
    settings = UNEVEN.model_copy(update={"alternations": alternations})
    result = match_networks(networks, settings, counts=counts)
    hidden = len(result.layers)
    assert all(set(layer.members.tolist()) >= {1, 4} for layer in result.layers)
    share = np.where(counts.sum(0) > 0, counts / counts.sum(0).clip(1), 1 / 4)
    places = [
        [np.arange(widths[0])] * 4,
        *[layer.assignments for layer in result.layers],
        [np.arange(widths[-1])] * 4,
    ]
    p0 = settings.sigma0**-2
    for depth, weight in enumerate(result.network.weights):
        last = depth == hidden
        for out, into in np.ndindex(*weight.shape):
            total, precision = 0.0, 0.0
            for client, own in enumerate(networks):
                above = np.flatnonzero(places[depth + 1][client] == out)
                below = np.flatnonzero(places[depth][client] == into)
                q = (share[client, out] if last else 1.0) / settings.sigma**2
                if len(above) and len(below):
                    total += q * own.weights[depth][above[0], below[0]]
                if len(below) and (len(above) or (depth and not alternations)):
                    precision += q
            if not alternations:
                wanted = total / (precision + p0)
            elif last:
                wanted = total * settings.sigma**2
            else:
                wanted = total / precision if precision else 0.0
            assert weight[out, into] == pytest.approx(wanted, abs=1e-12), (depth, out, into)


def test_passes_go_up_then_down_on_one_clock_and_one_rng(monkeypatch):
    rng = np.random.default_rng(0)
    networks, counts = clients(rng, [4, 5, 6, 3])
    calls, told = [], []
    ticks = iter(range(10**6))
    real = network._Networks.match

    def match(work, depth, layers, rng, joint):
        calls.append((depth, joint, rng))
        return real(work, depth, layers, rng, joint)

    sweeps = []
    one_layer = network.match_layer

    def match_layer(*arrays, **named):
        sweeps.append((named["iterations"], named["rng"]))
        return one_layer(*arrays, **named)

    monkeypatch.setattr(network._Networks, "match", match)
    monkeypatch.setattr(network, "match_layer", match_layer)
    # An objective that goes on falling, so that every pass is made.
    monkeypatch.setattr(network._Networks, "value", lambda *_: -float(next(ticks)))
    monkeypatch.setattr(descent, "perf_counter", lambda: len(sweeps))
    settings = UNEVEN.model_copy(update={"alternations": 4, "starts": 2, "iterations": 3})
    result = match_networks(networks, settings, counts=counts, seed=7, watch=told.append)
    up, down = [(0, True), (1, True)], [(1, True), (0, True)]
    assert [call[:2] for call in calls] == 2 * [(1, False), (0, False), *up, *down, *up, *down]
    assert len({id(call[2]) for call in calls[:10]}) == 1
    assert calls[0][2] is not calls[10][2]
    assert all(call[2] is rng for call, (_, rng) in zip(calls, sweeps, strict=True))
    assert [iterations for iterations, _ in sweeps] == 2 * [3, 3, *[1] * 8]
    # On this clock a layer takes a second: one from the top down, and one in each pass.
    assert len(result.objective) == 5
    assert result.seconds == [5, 5]
    head, passes = ["layer 2 of 2", "layer 1 of 2"], [f"pass {n}" for n in range(1, 5)]
    assert [line.split(", ")[0] for line in told] == [
        f"start {start}/2: {what}" for start in (1, 2) for what in [*head, *passes]
    ]
    told.clear()
    once = match_networks(networks, UNEVEN.model_copy(update={"starts": 3}), watch=told.append)
    assert told == head
    assert once.seconds == [1, 1]


def test_seeds_and_starts_have_streams_of_their_own(monkeypatch):
    rng = np.random.default_rng(1)
    networks, _ = clients(rng, [4, 5, 3])
    seen = []

    def top_down(work, rng, watch):
        seen.append(rng.bit_generator.state["state"]["state"])
        return real(work, rng, watch)

    real = network._Networks.top_down
    monkeypatch.setattr(network._Networks, "top_down", top_down)
    settings = UNEVEN.model_copy(update={"alternations": 1, "starts": 3})
    for seed in (5, 6, 5):
        match_networks(networks, settings, seed=seed)
    assert seen[:3] == seen[6:]
    assert len(set(seen)) == 6


def test_the_start_with_the_lowest_end_wins_and_the_first_of_equals(monkeypatch):
    rng = np.random.default_rng(2)
    networks, _ = clients(rng, [4, 5, 3])
    ends = iter([[9.0, 1.0, 5.0, 4.0], [9.0, 2.0, 4.0, 3.0], [0.0, 3.0, 0.0, 6.0], [1.0, 1.0, 3.0]])
    monkeypatch.setattr(
        network._Networks,
        "alternate",
        lambda work, found, rng, watch: replace(found, objective=next(ends)),
    )
    settings = UNEVEN.model_copy(update={"alternations": 3, "starts": 4})
    assert match_networks(networks, settings).objective == [9.0, 2.0, 4.0, 3.0]


def test_another_mass_for_the_start_is_for_the_start_alone():
    """A start with many neurons; a single sweep up and down joins some of them again."""
    rng = np.random.default_rng(4)
    networks, _ = clients(rng, [6, 5, 3])
    few = match_networks(networks, UNEVEN.model_copy(update={"alternations": 1}))
    apart = UNEVEN.model_copy(update={"alternations": 1, "start_gamma": 1e100})
    many = match_networks(networks, apart)
    # All apart: the objective at the start is that of 20 neurons, under the gamma of the run.
    one = match_networks(networks, UNEVEN.model_copy(update={"gamma": 1e100}))
    assert one.layers[0].size == 20
    assert many.objective[0] == pytest.approx(
        written_out(networks, one.layers, UNEVEN, np.ones((4, 3)))
    )
    assert many.objective[0] > few.objective[0]
    assert many.layers[0].size < 20
    # As published there is no start: its mass counts for nothing.
    plain = match_networks(networks, UNEVEN.model_copy(update={"start_gamma": 1e100}))
    assert plain.objective == match_networks(networks, UNEVEN).objective


def test_layers_of_one_neuron_are_layers():
    rng = np.random.default_rng(5)
    net = random_network(rng, [1, 1, 1])
    alone = MatchingSettings(alternations=1)
    fused = match_networks([net, net], alone).network
    assert fused.widths == [1, 1, 1]
    x = rng.normal(size=(9, 1))
    np.testing.assert_allclose(forward(fused, x), forward(net, x))


def test_classes_count_by_who_saw_them():
    """One that nobody saw says nothing of anybody; one sample decides, where it is the only one."""
    rng = np.random.default_rng(6)
    networks = [random_network(rng, [4, 3, 4]) for _ in range(3)]
    counts = np.array([[0.0, 1.0, 4.0, 0.0], [0.0, 0.0, 12.0, 2.0], [0.0, 0.0, 0.0, 2.0]])
    share = np.array([[1 / 3] * 3, [1, 0, 0], [0.25, 0.75, 0], [0, 0.5, 0.5]])
    fused = match_networks(networks, MatchingSettings(), counts=counts).network
    own = np.array([net.biases[1] for net in networks])
    np.testing.assert_allclose(fused.biases[1], (share * own.T).sum(1))


@pytest.mark.parametrize("bias", [True, False])
def test_one_network_is_its_own_fusion(bias):
    rng = np.random.default_rng(7)
    net = random_network(rng, [5, 4, 3], bias)
    fused = match_networks([net], MatchingSettings(alternations=2)).network
    x = rng.normal(size=(9, 5))
    np.testing.assert_allclose(forward(fused, x), forward(net, x))


def test_where_nobody_observed_anything_there_is_zero():
    """And not what lay in memory."""
    for _ in range(8):
        np.full((3, 4), np.nan)
        found = network._divide(np.zeros((3, 4)), np.eye(3, 4))
        assert (found == 0).all()
