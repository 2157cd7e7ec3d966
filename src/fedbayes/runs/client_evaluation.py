"""The global model as clients elsewhere find it, each on its own test samples."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from fedbayes.contracts import Federation
from fedbayes.core.messages import encode
from fedbayes.core.plausible import MOST_TIMES_ROWS
from fedbayes.core.tensors import Tensors
from fedbayes.errors import MessageError
from fedbayes.federation.client_runtime import ClientFailure, Task
from fedbayes.federation.engines import SupportsClientEvaluation
from fedbayes.federation.stages.checks import check_scores
from fedbayes.likelihoods import Classes, Likelihood, Scores
from fedbayes.likelihoods.measures import SCORE
from fedbayes.storage.scores import CLIENT_ROWS, Asked, ClientScores, GlobalEvaluation


def try_at_clients(
    engine: SupportsClientEvaluation,
    run: Federation,
    model: Tensors,
    number: int,
    measures: tuple[str, ...],
    most: float,
    temperature: float | None = None,
) -> GlobalEvaluation:
    """Have every client try the global model. Who does not answer, or not properly, is left out.

    Args:
        engine: the way to the clients.
        run: what no round changes.
        model: as the method gives it.
        number: the round after which it is tried.
        measures: metrics in addition to the likelihood's own.
        most: test samples of a client that are believed, as of the weight of its reports: metrics
            over all samples are means by these numbers.
        temperature: at which it is tried; None: as it is.
    """
    data, constants = encode(dict(model)), run.network.constants_digest
    outcomes = engine.tried(
        Task(client, number, data, None, constants, evaluate=measures, temperature=temperature)
        for client in range(run.clients)
    )
    told: dict[int, Scores] = {}
    missed: dict[int, str] = {}
    down = up = got = 0
    for client, outcome in enumerate(outcomes):
        down, up = down + outcome.link_down, up + outcome.link_up
        got += bool(outcome.link_down)
        if isinstance(outcome, ClientFailure):
            missed[client] = outcome.reason
            continue
        try:
            check_scores(outcome.scores, run.likelihood, measures)
            if (count := outcome.scores.get("count", 0)) > most:
                raise MessageError(
                    f"its scores have {count:,.0f} samples; the limit is {most:,.0f} "
                    "(aggregation.max_weight)"
                )
        except MessageError as error:
            missed[client] = str(error)
        else:
            if outcome.scores:
                told[client] = outcome.scores
    for client, why in _odd(told).items():
        missed[client] = why
        del told[client]
    return together(run.likelihood, told, Asked(run.clients, missed, got * len(data), down, up))


def _odd(told: Mapping[int, Scores]) -> dict[int, str]:
    """Clients whose scores would hide all others', by many samples or infinity, and why."""
    infinite = {c for c, own in told.items() if not all(map(math.isfinite, _sums(own)))}
    most = MOST_TIMES_ROWS * median([own["count"] for own in told.values()] or [0.0])
    found = {}
    for client, own in told.items():
        if len(told) > 2 and own["count"] > most:
            found[client] = (
                f"its scores have {own['count']:,.0f} samples, over {MOST_TIMES_ROWS:,} times "
                "those of the median client"
            )
        elif client in infinite and 2 * len(infinite) <= len(told):
            found[client] = "its scores are infinite, unlike those of most clients"
    return found


def _sums(scores: Scores) -> list[float]:
    return [value for name, value in scores.items() if not name.startswith(SCORE)]


def together(likelihood: Likelihood, told: dict[int, Scores], asked: Asked) -> GlobalEvaluation:
    """A global model that the clients tried, each on its own test samples.

    Sums add over clients. Metrics that are no sums are of each client alone, and so is nothing told
    that needs single samples: no calibration error, no accuracy by class.

    Args:
        likelihood: of the targets.
        told: what each client with test samples said.
        asked: how many were asked, and what became of it.
    """
    clients = ClientScores().after(told)
    sums = {n: float(v.sum()) for n, v in clients.sums.items() if not n.startswith(SCORE)}
    metrics = likelihood.metrics(sums) if told else {}
    line: dict[str, Any] = {"global_nll": metrics["nll"]} if told else {}
    line[CLIENT_ROWS] = int(sums.get("count", 0))
    if told and isinstance(likelihood, Classes):
        line["global_accuracy"] = metrics["accuracy"]
    if asked.missed:
        line["not_evaluated"] = {str(client): why for client, why in asked.missed.items()}
    return GlobalEvaluation(metrics, clients, line, asked)
