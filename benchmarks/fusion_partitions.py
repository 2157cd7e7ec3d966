"""Partitions of the fusion benchmark that are not built in: functions for `data.partition`."""

import numpy as np


def halves(y, clients, rng):
    """Every client has its own part of the classes, as equal as can be (ZipIt)."""
    classes = rng.permutation(int(y.max()) + 1)
    owner = np.empty(len(classes), np.int64)
    owner[classes] = np.arange(len(classes)) % clients
    return owner[y]


def uneven(y, clients, rng):
    """Dirichlet shares of every class, with concentrations 1 to 5 (neuron interpolation)."""
    owner = np.empty(len(y), np.int64)
    for k in range(int(y.max()) + 1):
        rows = rng.permutation(np.flatnonzero(y == k))
        shares = rng.dirichlet(rng.permutation(np.linspace(1, 5, clients)))
        owner[rows] = np.searchsorted(
            np.cumsum(shares[:-1]) * len(rows), np.arange(len(rows)), "right"
        )
    return owner


def labels(number):
    """FedLPA's: client i has class i and others at random; owners of a class share it equally."""

    def divide(y, clients, rng):
        classes = int(y.max()) + 1
        own = np.zeros((clients, classes), bool)
        for client in range(clients):
            own[client, client % classes] = True
            others = np.flatnonzero(~own[client])
            own[client, rng.choice(others, number - 1, replace=False)] = True
        owner = np.empty(len(y), np.int64)
        for k in range(classes):
            rows = rng.permutation(np.flatnonzero(y == k))
            owner[rows] = np.resize(np.flatnonzero(own[:, k]), len(rows))
        return owner

    return divide


one_label, two_labels, three_labels = map(labels, (1, 2, 3))
