"""When a run evaluates its global model, where, and by which metrics."""

from itertools import pairwise
from typing import TypeGuard

import torch

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation
from fedbayes.core.messages import encode
from fedbayes.core.tensors import Tensors
from fedbayes.data import FederatedData
from fedbayes.federation.client_runtime import Evaluation, due
from fedbayes.federation.engines import Engine, SupportsClientEvaluation
from fedbayes.federation.round import Round
from fedbayes.likelihoods.measures import AUTO, default_measures
from fedbayes.runs.client_evaluation import try_at_clients
from fedbayes.storage.scores import GlobalEvaluation

EVALUATION_ROWS = 1000
"""Test samples in one piece of an evaluation: the same on every engine, so are the sums."""
MOST_UNASKED = 100
"""Clients each of which has metrics that were not asked for by name: for more it takes a while."""
MOST_UNASKED_VALUES = 10_000_000
"""Predicted numbers that are held for such metrics: test samples times classes or columns."""


class Evaluator:
    """Evaluates the global model of a run."""

    def __init__(
        self, config: Config, method: AnyMethod, run: Federation, data: FederatedData
    ) -> None:
        self._config, self._method, self._run, self._data = config, method, run, data

    def due(self, number: int) -> bool:
        """Whether the model is evaluated after a round."""
        return due(number, self._config.evaluate_every, self._config.rounds)

    def tells_local(self, number: int, result: Round) -> bool:
        """Whether a round tells of the clients' own models, as far as they were evaluated."""
        own = due(number, self._config.evaluate_local_every, self._config.rounds)
        return own or self._method.reports.pooled or any(result.ledger.scores.values())

    def measures(self, last: bool) -> tuple[str, ...] | None:
        """Return the metrics of the global model in a round, in addition to the likelihood's own.

        None if the round does not report how metrics differ between clients either.
        """
        likelihood = self._run.likelihood
        if AUTO in self._config.metrics and self._config.at_clients:
            return default_measures(likelihood)  # they cost the server nothing
        if AUTO in self._config.metrics:
            held = self._data.test_total * len(self._data.target.names)
            few = held <= MOST_UNASKED_VALUES
            return None if not last else default_measures(likelihood) if few else ()
        return self._run.measures if self._config.metrics else None

    def possible(self, engine: Engine) -> bool:
        """Whether there is a global model, and something to evaluate it on."""
        if not self._method.models.has_global:
            return False
        return self._at_clients(engine) or self._data.test_total > 0

    def after_round(
        self,
        engine: Engine,
        model: Tensors,
        number: int,
        measures: tuple[str, ...],
        temperature: float | None = None,
    ) -> GlobalEvaluation:
        """The model after a round as the clients find it, or on the server's test samples; at a
        temperature if there is one.
        """
        if self._at_clients(engine):
            most = self._config.aggregation.max_weight
            return try_at_clients(engine, self._run, model, number, measures, most, temperature)
        return self.evaluate(engine, model, measures, temperature)

    def _at_clients(self, engine: Engine) -> TypeGuard[SupportsClientEvaluation]:
        return self._config.at_clients and isinstance(engine, SupportsClientEvaluation)

    def evaluate(
        self,
        engine: Engine,
        model: Tensors,
        measures: tuple[str, ...],
        temperature: float | None = None,
    ) -> GlobalEvaluation:
        """The model on the union of the clients' test sets; see `Simulation.evaluate`."""
        likelihood, data = self._run.likelihood, encode(dict(model))
        if likelihood.coupled:  # every client's rows by themselves, and all of them at once
            ends = self._data.test_sizes().cumsum().tolist()
            parts = [(start, stop) for start, stop in pairwise([0, *ends]) if start < stop]
        else:
            rows = self._data.test_total
            starts = range(0, rows, EVALUATION_ROWS)
            parts = [(start, min(start + EVALUATION_ROWS, rows)) for start in starts]
        evaluations = (Evaluation(data, *rows, measures, temperature) for rows in parts)
        pieces = list(engine.evaluate(evaluations))
        terms = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        each = AUTO not in self._config.metrics or len(self._data.owners) <= MOST_UNASKED
        found = GlobalEvaluation.of(likelihood, terms, self._data, measures, each=each)
        return found.on_reference() if self._config.reference else found
