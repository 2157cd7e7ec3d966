"""Fully connected networks to match, and their atoms."""

from itertools import pairwise

import numpy as np

from fedbayes.matching import Dense, match_layer


def random_network(rng, widths, bias=True):
    weights = [rng.normal(0, 1, (b, a)) for a, b in pairwise(widths)]
    biases = [rng.normal(0.1, 0.3, len(w)) for w in weights] if bias else None
    return Dense(weights, biases)


def forward(network, x):
    for depth, weight in enumerate(network.weights):
        x = x @ weight.T + (network.biases[depth] if network.biases else 0.0)
        if depth < len(network.weights) - 1:
            x = np.maximum(x, 0)
    return x


def permuted(network, rng):
    """The same function with its hidden neurons in another order."""
    weights, biases = [w.copy() for w in network.weights], network.biases and list(network.biases)
    for depth in range(len(weights) - 1):
        order = rng.permutation(len(weights[depth]))
        weights[depth] = weights[depth][order]
        weights[depth + 1] = weights[depth + 1][:, order]
        if biases:
            biases[depth] = biases[depth][order]
    return Dense(weights, biases)


def written_out(networks, layers, settings, counts):
    """The objective of the whole network, one weight at a time."""
    hidden = len(layers)
    totals = counts.sum(0)
    clients = len(networks)
    owned = {}
    for client, network in enumerate(networks):
        for depth, weight in enumerate(network.weights):
            for out, row in enumerate(weight):
                above = layers[depth].assignments[client][out] if depth < hidden else out
                q = settings.sigma**-2
                if depth == hidden:
                    q *= clients * counts[client, out] / totals[out] if totals[out] else 1
                for into, value in enumerate(row):
                    below = layers[depth - 1].assignments[client][into] if depth else into
                    owned.setdefault((depth, above, below), []).append((q, value))
                if network.biases and depth < hidden:
                    value = network.biases[depth][out] - settings.bias_mean
                    owned.setdefault((depth, above, "bias"), []).append((q, value))
    total, p0 = 0.0, settings.sigma0**-2
    for observations in owned.values():
        precision = sum(q for q, _ in observations)
        theta = sum(q * w for q, w in observations) / (p0 + precision)
        total += p0 * theta**2 + settings.epsilon * precision * theta**2
        total += sum(q * ((w - theta) ** 2 - w**2) for q, w in observations)
    for layer in layers:
        members = np.bincount(np.concatenate(layer.assignments))
        for n in members:
            total -= 2 * np.log(settings.gamma / clients)
            for m in range(1, n):
                total -= settings.popularity_weight * np.log(m / (clients - m))
        for own in layer.assignments:
            alone = int((members[own] == 1).sum())
            total += 2 * np.log(np.arange(1, alone + 1)).sum()
    return total


def process(assignments, objective, clients):
    """−2 log of the exchangeable process' terms, atom by atom."""
    members = np.bincount(np.concatenate(assignments))
    total = 0.0
    for n in members:
        total += -2 * np.log(objective.gamma / clients)
        for m in range(1, n):
            counted = min(m, objective.popularity_cap or m)
            total -= objective.popularity_weight * np.log(counted / (clients - counted))
    for own in assignments if objective.new_atoms == "paper" else ():
        alone = int((members[own] == 1).sum())
        total += 2 * np.log(np.arange(1, alone + 1)).sum()
    return total


def match(atoms, precisions, mean, prior, objective, **more):
    return match_layer(
        atoms, precisions, prior_mean=mean, prior_precision=prior, objective=objective, **more
    )
