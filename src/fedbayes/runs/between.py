"""How metrics differ between clients: the mean, the worst client, the spread; where none is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedbayes.likelihoods import Likelihood
from fedbayes.likelihoods.measures import better

BETWEEN = ("mean", "worst", "spread")
"""What is told of a metric over clients: tables such as `global_worst` of a line."""


@dataclass(frozen=True)
class Between:
    """Metrics of each client that was evaluated."""

    each: Mapping[int, Mapping[str, float]]
    """By client and name; NaN where a metric is undefined on a client's test rows."""
    likelihood: Likelihood
    """Whose headline says of a metric of one's own whether higher is better."""

    @property
    def names(self) -> list[str]:
        """Names of the metrics."""
        return list(dict.fromkeys(name for own in self.each.values() for name in own))

    def defined(self, name: str) -> dict[int, float]:
        """The metric of each client that has it."""
        found = {client: own.get(name, math.nan) for client, own in self.each.items()}
        return {client: value for client, value in found.items() if not math.isnan(value)}

    def higher_is_better(self, name: str) -> bool | None:
        """Whether a higher value of a metric is a better one; None if neither, or unknown."""
        if name == self.likelihood.metric:
            return self.likelihood.higher_is_better
        return better(name)

    def worst_client(self, name: str) -> int | None:
        """The client that a metric is worst of, the first of several; None if nobody is."""
        values, higher = self.defined(name), self.higher_is_better(name)
        if higher is None or not values:
            return None
        return (min if higher else max)(values, key=lambda client: values[client])

    def undefined(self) -> dict[str, list[int]]:
        """Of each metric that some have and others have not, those who have not; of one that
        nobody has, all.
        """
        found = {
            name: [client for client in self.each if client not in self.defined(name)]
            for name in self.names
        }
        return {name: clients for name, clients in found.items() if clients}

    def mean(self) -> dict[str, float]:
        """Mean of each metric over the clients that have a finite one."""
        return {n: float(np.mean(v)) for n in self.names if (v := self._finite(n))}

    def worst(self) -> dict[str, float]:
        """The worst client's value of each metric of which higher or lower is better."""
        found = {name: self.worst_client(name) for name in self.names}
        return {n: self.each[client][n] for n, client in found.items() if client is not None}

    def spread(self) -> dict[str, float]:
        """Standard deviation of each metric between two or more clients (with n − 1)."""
        found = {name: self._finite(name) for name in self.names}
        return {n: float(np.std(values, ddof=1)) for n, values in found.items() if len(values) > 1}

    def columns(self, clients: int) -> dict[str, list[float | None]]:
        """Each metric of so many clients, None where there is none."""
        return {
            name: [self.defined(name).get(client) for client in range(clients)]
            for name in self.names
        }

    def _finite(self, name: str) -> list[float]:
        return [value for value in self.defined(name).values() if math.isfinite(value)]
