"""How metrics differ between clients: the mean, the worst client, the spread; where none is.

Light to import (no PyTorch), as what is shown while a run goes.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedbayes.core.targets import Target
from fedbayes.likelihoods.measures import better

if TYPE_CHECKING:
    from fedbayes.likelihoods import Likelihood

BETWEEN = ("mean", "worst", "spread")
"""Statistics of a metric over clients: tables such as `global_worst` of a line."""


MOST_LISTED = 1000
"""Clients of whom each has an entry in lines and summaries; of more, those that were evaluated."""
CLIENT = "client"
"""In addition to metrics of some clients: their indices."""


@dataclass(frozen=True)
class ClientSpread:
    """Metrics of each client that was evaluated.

    Examples:
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import build_likelihood
        >>> from fedbayes.storage.client_spread import ClientSpread
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> found = ClientSpread({0: {"accuracy": 0.5}, 1: {"accuracy": 0.9}}, likelihood)
        >>> found.worst_client("accuracy")
        0
    """

    each: Mapping[int, Mapping[str, float]]
    """By client and name; NaN where a metric is undefined on a client's test rows."""
    likelihood: "Likelihood"
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

    def told(self, clients: int) -> dict[str, list[Any]]:
        """What a line holds of single clients: `columns` of all of them where they are few or all
        were evaluated, else of those alone that were, with their indices as `client`. So it is too
        where some of them are none of the clients that can be trained on.

        Args:
            clients: how many there are.
        """
        few = clients <= MOST_LISTED or len(self.each) == clients
        if few and max(self.each) < clients:
            return self.columns(range(clients))
        return {CLIENT: list(self.each), **self.columns(self.each)}

    def undefined(self) -> dict[str, list[int]]:
        """Of each metric that some have and others have not, those who have not; of one that
        nobody has, all.
        """
        found = {}
        for name in self.names:
            defined = self.defined(name)
            found[name] = [client for client in self.each if client not in defined]
        return {name: clients for name, clients in found.items() if clients}

    def mean(self) -> dict[str, float]:
        """Mean of each metric over the clients that have a finite one."""
        return {n: statistics.fmean(v) for n in self.names if (v := self._finite(n))}

    def worst(self) -> dict[str, float]:
        """The worst client's value of each metric of which higher or lower is better."""
        found = {name: self.worst_client(name) for name in self.names}
        return {n: self.each[client][n] for n, client in found.items() if client is not None}

    def spread(self) -> dict[str, float]:
        """Standard deviation of each metric between two or more clients (with n − 1)."""
        import numpy as np

        found = {name: self._finite(name) for name in self.names}
        return {n: float(np.std(values, ddof=1)) for n, values in found.items() if len(values) > 1}

    def columns(self, clients: Iterable[int]) -> dict[str, list[float | None]]:
        """Each metric of these clients, None where there is none."""
        found = {name: self.defined(name) for name in self.names}
        return {name: [own.get(client) for client in clients] for name, own in found.items()}

    def _finite(self, name: str) -> list[float]:
        return [value for value in self.defined(name).values() if math.isfinite(value)]


def tables(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The newest tables of how metrics differ between clients, such as `global_worst`."""
    found = {}
    for table in (f"{whose}_{kind}" for whose in ("global", "local") for kind in BETWEEN):
        if line := _newest(lines, "metrics", table):
            found[table] = line["metrics"][table]
    return found


def per_client(
    lines: Sequence[Mapping[str, Any]], names: Sequence[str], target: Target
) -> dict[str, Any]:
    """The newest metrics of each client by its name.

    Returns:
        `per_client`: by `global` (the global model on its test rows) and `local` (its own model),
        the client and the metric, None where it has none; of more than `MOST_LISTED` clients those
        that the line tells of. `undefined`: of whose test rows a metric
        has no value. `positive_class`, of two. Nothing where no round tells.
    """
    told: dict[str, Any] = {}
    undefined: dict[str, Any] = {}
    for whose in ("global", "local"):
        line = _newest(lines, "by_client", whose)
        if line is None:
            continue
        columns = line["by_client"][whose]
        clients = columns.get(CLIENT) or range(max(map(len, columns.values())))
        told[whose] = {
            names[client]: {m: values[at] for m, values in columns.items() if m != CLIENT}
            for at, client in enumerate(clients)
        }
        if lacking := line.get("undefined", {}).get(whose):
            undefined[whose] = {m: [names[c] for c in clients] for m, clients in lacking.items()}
    if not told:
        return {}
    return {
        "per_client": told,
        **({"undefined": undefined} if undefined else {}),
        **({"positive_class": target.names[1]} if target.classes == 2 else {}),
    }


def _newest(lines: Sequence[Mapping[str, Any]], entry: str, key: str) -> Mapping[str, Any] | None:
    """The newest line whose entry has such a key."""
    return next((line for line in reversed(lines) if key in line.get(entry, {})), None)


def as_summary(
    whole: Mapping[str, float], each: Mapping[str, Mapping[str, float]], likelihood: "Likelihood"
) -> dict[str, Any]:
    """What a summary would tell of a model that was tried on clients' rows, for `rows`.

    Args:
        whole: its metrics on all rows.
        each: its metrics on each client's rows by name; NaN where one is undefined.
        likelihood: of the targets.
    """
    names = list(each)
    told = ClientSpread(dict(enumerate(each.values())), likelihood)
    line = {
        "metrics": {"global": whole}
        | {f"global_{kind}": getattr(told, kind)() for kind in BETWEEN},
        "by_client": {"global": told.columns(range(len(names)))},
        "undefined": {"global": told.undefined()},
    }
    return {"metrics": line["metrics"], **per_client([line], names, likelihood.target)}


BALANCED = "balanced_accuracy"
_MISLEADS = 0.1
"""By how much accuracy exceeds balanced accuracy where it says little of rare classes."""


def balanced_leads(metrics: Mapping[str, Any]) -> bool:
    """Whether balanced accuracy is shown before accuracy, since rare classes are mostly missed."""
    plain, balanced = metrics.get("accuracy"), metrics.get(BALANCED)
    return plain is not None and balanced is not None and plain - balanced > _MISLEADS


def one_class(metrics: Mapping[str, Any]) -> bool:
    """Whether a model of two classes predicts the same one for all rows."""
    return {metrics.get("sensitivity"), metrics.get("specificity")} == {0.0, 1.0}


@dataclass(frozen=True)
class SpreadRow:
    """A metric of a model, of all test rows and between clients; None where there is no value."""

    metric: str
    whole: float | None
    """Of all test rows together, of the global model alone."""
    mean: float | None
    spread: float | None
    worst: float | None
    client: str
    """The name of the worst client."""
    undefined: tuple[str, ...]
    """Clients on whose test rows it is undefined."""


def rows(summary: Mapping[str, Any], whose: str) -> list[SpreadRow]:
    """What a summary, as in `summary.json`, tells of the metrics of each client, for tables, of
    models that are `global` or `local`.
    """
    each = summary.get("per_client", {}).get(whose, {})
    metrics = summary["metrics"]
    mean = metrics.get("global_mean" if whose == "global" else "local", {})
    spread, worst = (metrics.get(f"{whose}_{kind}", {}) for kind in ("spread", "worst"))
    undefined = summary.get("undefined", {}).get(whose, {})
    names = list(dict.fromkeys(name for own in each.values() for name in own))
    if balanced_leads(metrics.get("global", {}) if whose == "global" else mean):
        names.sort(key=lambda name: name != BALANCED)
    return [
        SpreadRow(
            name,
            metrics.get("global", {}).get(name) if whose == "global" else None,
            mean.get(name),
            spread.get(name),
            worst.get(name),
            next((c for c, own in each.items() if own[name] == worst.get(name, math.nan)), ""),
            tuple(undefined.get(name, ())),
        )
        for name in names
    ]
