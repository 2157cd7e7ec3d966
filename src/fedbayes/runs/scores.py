"""Scores of a run: of every client's own model, and of the global model on all clients' tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from fedbayes.data import FederatedData
from fedbayes.federation.attacks.adversary import SUCCESS, success_of
from fedbayes.likelihoods import Classes, Likelihood, Scores, total
from fedbayes.metrics import calibrate
from fedbayes.tensors import Tensors


@dataclass(frozen=True)
class ClientScores:
    """Of each client, the scores of the model that it last reported, on its own test samples."""

    sums: Tensors = field(default_factory=dict)
    """By name, float64 [S]; all zero for a client that was not evaluated yet."""

    @classmethod
    def none(cls, clients: int) -> Self:
        """Scores of so many clients before any report: zeros."""
        return cls({"count": torch.zeros(clients, dtype=torch.float64)})

    def after(self, scores: dict[int, Scores]) -> Self:
        """With the scores of some clients in place of those that they had."""
        sums = {name: values.clone() for name, values in self.sums.items()}
        for client, reported in scores.items():
            for name, value in reported.items():
                column = sums.setdefault(name, torch.zeros_like(self.sums["count"]))
                column[client] = value
        return type(self)(sums)

    @property
    def tested(self) -> int:
        """Clients that were evaluated."""
        return int((self.sums["count"] > 0).sum())

    def each(self, likelihood: Likelihood) -> dict[int, dict[str, float]]:
        """Metrics of each client that was evaluated."""
        clients = (self.sums["count"] > 0).nonzero()[:, 0].tolist()
        columns = {name: values.tolist() for name, values in self.sums.items()}
        return {
            client: likelihood.metrics({name: values[client] for name, values in columns.items()})
            for client in clients
        }

    def means(self, likelihood: Likelihood) -> dict[str, float]:
        """Means of the metrics over the clients that were evaluated; empty if none was."""
        return mean_metrics(list(self.each(likelihood).values()))


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
class GlobalEvaluation:
    """A global model on the union of the clients' test sets."""

    metrics: dict[str, float]
    """Metrics over all test samples; for classes with the calibration error `ece`."""
    clients: ClientScores
    """The same model on each client's test samples."""
    line: dict[str, Any]
    """What a line of `metrics.jsonl` says beside `metrics`: for classes `global_accuracy`,
    `global_nll`, `global_ece`, `class_accuracy`; else `global_nll`. Under an attack that aims at
    test samples its `attack_success` too."""

    @classmethod
    def of(cls, likelihood: Likelihood, terms: Tensors, data: FederatedData) -> Self:
        """From the terms of all test samples, client by client.

        Args:
            likelihood: of the targets.
            terms: by name, float64 [n].
            data: the clients' data.
        """
        success = success_of(terms)
        terms = {name: values for name, values in terms.items() if name != SUCCESS}
        owner = torch.repeat_interleave(torch.as_tensor(data.test_sizes()))
        sums = {
            name: torch.bincount(owner, values, minlength=data.clients)
            for name, values in terms.items()
        }
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
        if success is not None:
            line[SUCCESS] = success
        return cls(metrics, ClientScores(sums), line)


def _by_class(right: Tensor, truth: Tensor, classes: int) -> list[float | None]:
    """Share of the test samples of each class that was predicted right; None of no samples."""
    tested = torch.bincount(truth, minlength=classes)
    correct = torch.bincount(truth, right.double(), minlength=classes)
    return [
        count / samples if samples else None
        for count, samples in zip(correct.tolist(), tested.tolist(), strict=True)
    ]
