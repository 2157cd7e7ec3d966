"""The metrics of rounds by name, and how the headline among them stands: which round was best."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

TABLES = ("metrics", "update", "reported")
"""The tables of figures in a line."""
OURS = frozenset(
    (
        *(
            "round",
            "seconds",
            "cohort",
            "class_accuracy",
            "by_client",
            "undefined",
            "sparsity",
            "model_parameters",
        ),
        *("bytes_down", "bytes_up", "spared_down", "spared_up", "link_down", "link_up"),
        *("refused", "lost", "troubles", "outliers", "skipped", "undone", "stopped"),
        *("not_evaluated", "clock_seconds", "asynchronous"),
    )
)
"""Entries of a line that are no figures of clients or methods."""
_DIVERGED = 10.0
"""Nats by which the mean negative log-likelihood may rise."""
_BEGINNINGS = ("global_", "local_", "best_", "reported_", "update_")


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `metrics.jsonl` with its tables of metrics as entries, such as `global_rmse`.

    What clients reported and what the update says of itself have their own names, such as `loss`,
    unless that could be one of ours: then it is `reported_NAME` or `update_NAME`. Lines of older
    versions have no such tables: theirs are entries already.
    """
    entries = {name: value for name, value in line.items() if name not in TABLES}
    for whose, table in line.get("metrics", {}).items():
        entries |= {f"{whose}_{name}": value for name, value in table.items()}
    for whose in ("update", "reported"):
        for name, value in line.get(whose, {}).items():
            ours = name in entries or name in OURS or name.startswith(_BEGINNINGS)
            entries[f"{whose}_{name}" if ours else name] = value
    return entries


@dataclass(frozen=True)
class BestTracker:
    """The headline metric over the rounds that tell it."""

    whose: str
    """`global` or `local`: the global model's, or the mean over the clients' own models."""
    metric: str
    """Its name in the lines of `metrics.jsonl`."""
    higher_is_better: bool = True
    """Whether a higher value is a better one."""
    min_improvement: float = 0.0
    """Change for the better since the last improvement that counts as one."""
    best: float = -math.inf
    """The best value, its sign turned if lower is better."""
    best_round: int = 0
    """The first round that has it; 0 before any."""
    improved: float = -math.inf
    """The value at the last improvement, likewise."""
    waited: int = 0
    """Rounds told of since then."""
    clients: int = 0
    """Clients that it is a mean over, where these grow in number."""

    def after(self, line: dict[str, Any]) -> Self:
        """The standing after a round, of which this is the line; it may not tell the metric."""
        value = flat(line).get(f"{self.whose}_{self.metric}")
        if value is None:
            return self
        value = value if self.higher_is_better else -value
        standing = self
        clients = line.get("local_clients", 0) if self.whose == "local" else 0
        if clients != self.clients:
            # A mean over other clients: what came before does not compare.
            standing = replace(
                self, best=-math.inf, best_round=0, improved=-math.inf, waited=0, clients=clients
            )
        if value > standing.best:
            standing = replace(standing, best=value, best_round=line["round"])
        if value > standing.improved + self.min_improvement:
            return replace(standing, improved=value, waited=0)
        return replace(standing, waited=standing.waited + 1)

    def best_among(self, lines: Iterable[dict[str, Any]]) -> Self:
        """The same, but that the best round is that of these, which are of rounds so far."""
        found = replace(self, best=-math.inf, best_round=0, clients=0).after_all(lines)
        return replace(self, best=found.best, best_round=found.best_round)

    def after_all(self, lines: Iterable[dict[str, Any]]) -> Self:
        """The standing after these rounds."""
        standing = self
        for line in lines:
            standing = standing.after(line)
        return standing


def divergence(lines: Iterable[dict[str, Any]], *, noisy: bool = False) -> str:
    """What to say of a run whose model ends far worse than it was; nothing of others.

    Far worse: the mean negative log-likelihood of test samples has left its least by more than
    `_DIVERGED` nats, and by more than that least itself. Judged is the global model where there is
    one, else the clients' own.

    Args:
        lines: those of `metrics.jsonl`.
        noisy: whether updates have noise for privacy, which is then the likely cause.
    """
    way_out = (
        "With noise for privacy, fewer rounds or more clients in each help"
        if noisy
        else "Try a smaller training.lr, or fewer steps per round"
    )
    told = [(line["round"], flat(line)) for line in lines]
    for whose, model in (("global", "the global model"), ("local", "clients' own models")):
        found = [
            (float(line[f"{whose}_nll"]), number)
            for number, line in told
            if line.get(f"{whose}_nll") is not None
        ]
        finite = [one for one in found if math.isfinite(one[0])]
        if finite:
            (least, at), (last, _) = min(finite), found[-1]
            if last - least <= max(_DIVERGED, abs(least)):
                return ""
            return (
                f"training diverged: with {model} the test NLL is {last:.4g} at the end, and was "
                f"{least:.4g} after round {at}. {way_out}"
            )
    return ""
