"""Scores of a run: of every client's own model, and of the global model on all clients' tests."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedbayes.data import FederatedData
from fedbayes.federation.attacks.adversary import SUCCESS, success_of
from fedbayes.likelihoods import Classes, Likelihood, Scores, parted, total
from fedbayes.likelihoods.measures import SCORE, measured
from fedbayes.metrics import calibrate
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class ClientScores:
    """Of each client, the scores of the model that it last reported, on its own test samples."""

    sums: Tensors = field(default_factory=dict)
    """By name, float64 [S]; all zero for a client that was not evaluated yet. Metrics that are no
    sums, `metric/NAME`, are themselves, NaN where they are undefined or were not told."""

    @classmethod
    def none(cls, clients: int) -> Self:
        """Scores of so many clients before any report: zeros."""
        return cls({"count": torch.zeros(clients, dtype=torch.float64)})

    def after(self, scores: dict[int, Scores]) -> Self:
        """With the scores of some clients in place of those that they had."""
        sums = {name: values.clone() for name, values in self.sums.items()}
        for client, reported in scores.items():
            for name in sums.keys() - reported.keys():
                if name.startswith(SCORE):
                    sums[name][client] = torch.nan
            for name, value in reported.items():
                empty = torch.nan if name.startswith(SCORE) else 0.0
                column = sums.setdefault(name, torch.full_like(self.sums["count"], empty))
                column[client] = value
        return type(self)(sums)

    @property
    def tested(self) -> int:
        """Clients that were evaluated."""
        return int((self.sums["count"] > 0).sum())

    def each(self, likelihood: Likelihood) -> dict[int, dict[str, float]]:
        """Metrics of each client that was evaluated."""
        clients = (self.sums["count"] > 0).nonzero()[:, 0].tolist()
        told = {name: values.tolist() for name, values in self.sums.items()}
        asked = {n.removeprefix(SCORE): told.pop(n) for n in list(told) if n.startswith(SCORE)}
        return {
            client: likelihood.metrics({name: values[client] for name, values in told.items()})
            | {name: values[client] for name, values in asked.items()}
            for client in clients
        }

    def means(self, likelihood: Likelihood) -> dict[str, float]:
        """Means of the metrics over the clients that were evaluated; empty if none was. A metric
        that was asked for and that no client has is left out.
        """
        means = mean_metrics(list(self.each(likelihood).values()))
        asked = {name.removeprefix(SCORE) for name in self.sums if name.startswith(SCORE)}
        return {n: v for n, v in means.items() if not (n in asked and math.isnan(v))}


def test_parts(data: FederatedData, likelihood: Likelihood) -> list[Samples]:
    """The union of the clients' test samples, in its order: in parts that are evaluated by
    themselves, each client's where the likelihood couples samples, else in one.
    """
    if not likelihood.coupled:
        return [data.test_union(0, data.test_total)]
    return [data.test(client) for client in np.flatnonzero(data.test_sizes()).tolist()]


def mean_metrics(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every metric over those that have a finite one (a single sample has no R², a
    model that diverged an infinite loss); of what there is if none has, and empty if there are no
    metrics.
    """
    return {name: _mean([metrics[name] for metrics in each]) for name in (each[0] if each else ())}


def _mean(values: list[float]) -> float:
    found = torch.tensor(values, dtype=torch.float64)
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
    """What a line of `metrics.jsonl` says beside `metrics`: for classes `global_accuracy`,
    `global_nll`, `global_ece`, `class_accuracy`; else `global_nll`. Under an attack that aims at
    test samples its `attack_success` too."""
    asked: Asked | None = None
    """What became of the clients' answers, where they tried it; None where they did not."""

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
        owner = torch.repeat_interleave(torch.as_tensor(data.test_sizes()))
        sums = {
            name: torch.bincount(owner, values, minlength=data.clients)
            for name, values in terms.items()
        }
        if each:
            sums |= _by_client(measures, columns, data.test_sizes().tolist())
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
        return cls(metrics, ClientScores(sums), line)


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
