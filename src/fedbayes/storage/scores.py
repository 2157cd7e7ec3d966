"""Scores of a run: of every client's own model, and of the global model on all clients' tests."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from fedbayes.core.by_client import NOBODY, ByClient
from fedbayes.core.metrics import calibrate
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.data import FederatedData
from fedbayes.federation.attacks.adversary import SUCCESS, success_of
from fedbayes.likelihoods import Classes, Likelihood, Scores, parted, total
from fedbayes.likelihoods.measures import SCORE, measured

REFERENCE_ROWS, CLIENT_ROWS = "reference_rows", "client_rows"
"""Entries of a line: of how many rows of a server's reference table its global metrics are, or of
how many test rows that clients keep."""


@dataclass(frozen=True)
class ClientScores:
    """Of each client, the scores of the model that it last reported, on its own test samples."""

    table: ByClient = field(default_factory=ByClient)
    """Of each client that was evaluated, sums by name, float64 [n]. Metrics that are no sums,
    `metric/NAME`, are themselves, NaN where they are undefined or were not told."""

    @property
    def sums(self) -> Tensors:
        """The columns of the table."""
        return self.table.columns

    def after(self, scores: Mapping[int, Scores]) -> Self:
        """With the scores of some clients instead of those that they had; a client that tells
        none keeps its own.
        """
        chosen = [c for c in sorted(scores) if scores[c]]
        known = {c: row for c in chosen if (row := self.table.row(c)) is not None}
        names = dict.fromkeys((*self.sums, *(name for c in chosen for name in scores[c])))
        columns: Tensors = {}
        for name in names:
            empty = torch.nan if name.startswith(SCORE) else 0.0
            before = self.sums.get(name)
            # A sum that is not told stays as it was; a metric that is none is undefined.
            kept = before is not None and not name.startswith(SCORE)
            values = [
                scores[c].get(name, float(before[known[c]]) if kept and c in known else empty)  # type: ignore[index]
                for c in chosen
            ]
            columns[name] = torch.tensor(values, dtype=torch.float64)
        clients = torch.tensor(chosen, dtype=torch.int64)
        empty_by_name = {name: torch.nan for name in names if name.startswith(SCORE)}
        found = type(self)(self.table.having(clients, columns, empty_by_name))
        if (memo := self._memo) is not None:
            stale = memo.stale | frozenset(chosen)
            found.__dict__["memo"] = replace(memo, stale=stale)
        return found

    @property
    def tested(self) -> int:
        """Clients that were evaluated."""
        return int((self.sums["count"] > 0).sum()) if self.sums else 0

    def each(
        self, likelihood: Likelihood, only: Collection[int] | None = None
    ) -> dict[int, dict[str, float]]:
        """Metrics of each client that was evaluated, or of these among them."""
        rows = (self.sums["count"] > 0).nonzero()[:, 0] if self.sums else NOBODY
        if only is not None:
            rows = rows[
                torch.isin(self.table.clients[rows], torch.tensor([*only], dtype=torch.int64))
            ]
        told = {name: values[rows].tolist() for name, values in self.sums.items()}
        asked = {n.removeprefix(SCORE): told.pop(n) for n in list(told) if n.startswith(SCORE)}
        return {
            client: likelihood.metrics({name: values[at] for name, values in told.items()})
            | {name: values[at] for name, values in asked.items()}
            for at, client in enumerate(self.table.clients[rows].tolist())
        }

    def means(self, likelihood: Likelihood) -> dict[str, float]:
        """Means of the metrics over the clients that were evaluated; empty if none was. A metric
        that was asked for and that no client has is left out.
        """
        means = {name: _mean(values) for name, values in self._metrics(likelihood).items()}
        asked = {name.removeprefix(SCORE) for name in self.sums if name.startswith(SCORE)}
        return {n: v for n, v in means.items() if not (n in asked and math.isnan(v))}

    def _metrics(self, likelihood: Likelihood) -> Tensors:
        """As `each`, by name, float64 [n]; computed of those alone whose scores have changed."""
        memo = self._memo
        if memo is None or memo.likelihood is not likelihood:
            memo = _Memo(likelihood)
        each = self.each(likelihood, None if not memo.metrics.columns else memo.stale)
        metrics = memo.metrics
        if each:
            columns = {
                name: torch.tensor([own[name] for own in each.values()], dtype=torch.float64)
                for name in next(iter(each.values()))
            }
            empty = dict.fromkeys(columns, torch.nan)
            metrics = metrics.having(torch.tensor([*each]), columns, empty)
        self.__dict__["memo"] = _Memo(likelihood, metrics)
        return metrics.columns

    @property
    def _memo(self) -> "_Memo | None":
        """Metrics of an earlier state that still hold; it is no field, so it is not stored."""
        found: _Memo | None = self.__dict__.get("memo")
        return found


@dataclass(frozen=True)
class _Memo:
    """Metrics of clients, under a likelihood."""

    likelihood: Likelihood
    metrics: ByClient = field(default_factory=ByClient)
    stale: frozenset[int] = frozenset()
    """Clients whose scores have changed since."""


def test_parts(data: FederatedData, likelihood: Likelihood) -> list[Samples]:
    """The union of the clients' test samples, in its order: in parts that are evaluated by
    themselves, each client's where the likelihood couples samples, else in one.
    """
    if not likelihood.coupled:
        return [data.test_union(0, data.test_total)]
    return [data.test(client) for client in data.owners[data.test_sizes() > 0].tolist()]


def _mean(found: Tensor) -> float:
    """The mean of those that are finite; of what there is if none are."""
    finite = found[found.isfinite()]
    return float(finite.mean() if len(finite) else found.nanmean())


@dataclass(frozen=True)
class Asked:
    """What became of a global model that the clients were to try."""

    clients: int
    """How many there are."""
    missed: dict[int, str]
    """Those that did not say how it does, and why."""
    bytes_down: int
    """Encoded bytes of the model, to all that got it."""
    link_down: int = 0
    """Bytes that a network carried to the clients."""
    link_up: int = 0
    """Bytes that a network carried from them."""


@dataclass(frozen=True)
class GlobalEvaluation:
    """A global model on the union of the clients' test sets."""

    metrics: dict[str, float]
    """Metrics over all test samples; for classes with the calibration error `ece`. One that was
    asked for and is undefined is left out."""
    clients: ClientScores
    """The same model on each client's test samples."""
    line: dict[str, Any]
    """What a line of `metrics.jsonl` says in addition to `metrics`: for classes `global_accuracy`,
    `global_nll`, `global_ece`, `class_accuracy`; else `global_nll`. Under an attack that aims at
    test samples its `attack_success` too."""
    asked: Asked | None = None
    """What became of the clients' answers, where they tried it; None where they did not."""

    def on_reference(self) -> Self:
        """Return the scores on a server's reference rows, which are no client's, in total only."""
        rows = int(self.clients.sums["count"].sum())
        line = {**self.line, REFERENCE_ROWS: rows}
        return replace(self, clients=ClientScores(), line=line)

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        terms: Tensors,
        data: FederatedData,
        measures: Collection[str] = (),
        *,
        each: bool = True,
    ) -> Self:
        """From the terms of all test samples, client by client.

        Args:
            likelihood: of the targets.
            terms: by name, float64 [n], and what metrics need of predictions.
            data: the clients' data.
            measures: names of these metrics.
            each: whether they are of each client's test samples too.
        """
        terms, columns = parted(terms)
        success = success_of(terms)
        terms = {name: values for name, values in terms.items() if name != SUCCESS}
        sizes = torch.as_tensor(data.test_sizes())
        owner = torch.repeat_interleave(sizes)
        sums = {
            name: torch.bincount(owner, values, minlength=len(sizes))
            for name, values in terms.items()
        }
        if each:
            sums |= _by_client(measures, columns, sizes.tolist())
        tested, owners = sizes > 0, torch.as_tensor(data.owners)
        clients = ByClient(owners[tested], {n: values[tested] for n, values in sums.items()})
        metrics = likelihood.metrics(total(terms))
        line: dict[str, Any] = {"global_nll": metrics["nll"]}
        if isinstance(likelihood, Classes):
            right = terms["correct"] > 0
            truth = torch.as_tensor(data.test_labels())
            metrics["ece"] = calibrate(terms["confidence"], right).error
            line |= {
                "global_accuracy": metrics["accuracy"],
                "global_ece": metrics["ece"],
                "class_accuracy": _by_class(right, truth, len(data.classes)),
            }
        found = measured(measures, columns)
        metrics |= {name: value for name, value in found.items() if not math.isnan(value)}
        if success is not None:
            line[SUCCESS] = success
        return cls(metrics, ClientScores(clients), line)


def _by_client(measures: Collection[str], columns: Tensors, sizes: list[int]) -> Tensors:
    """Of each client, metrics of its own rows of predictions, float64 [S] by name of the score."""
    parts = {name: torch.split(values, sizes) for name, values in columns.items()}
    found = [
        measured(measures, {name: rows[client] for name, rows in parts.items()})
        for client in range(len(sizes))
    ]
    return {
        f"{SCORE}{name}": torch.tensor([own[name] for own in found], dtype=torch.float64)
        for name in measures
    }


def _by_class(right: Tensor, truth: Tensor, classes: int) -> list[float | None]:
    """Share of the test samples of each class that was predicted right; None of no samples."""
    tested = torch.bincount(truth, minlength=classes)
    correct = torch.bincount(truth, right.double(), minlength=classes)
    return [
        count / samples if samples else None
        for count, samples in zip(correct.tolist(), tested.tolist(), strict=True)
    ]
