"""What a line of `metrics.jsonl` says of a round."""

from collections.abc import Collection, Mapping
from typing import Any

from fedbayes.core.tensors import Tensors, parameter_count, sparsity
from fedbayes.federation.round import Round
from fedbayes.likelihoods import Likelihood
from fedbayes.models import Network
from fedbayes.storage.client_spread import BETWEEN, MOST_LISTED, ClientSpread
from fedbayes.storage.metrics_file import Metrics
from fedbayes.storage.scores import ClientScores, GlobalEvaluation

GLOBAL = frozenset(
    ("global_accuracy", "global_nll", "global_ece", "class_accuracy", "attack_success")
)
"""Metrics of the global model on the union of the clients' test sets."""


def evaluation_line(
    likelihood: Likelihood,
    evaluated: GlobalEvaluation | None,
    clients: ClientScores,
    *,
    between: int = 0,
    recent: Collection[int] = (),
) -> Metrics:
    """Return the metrics of a line: of the global model, if it was evaluated, and of clients' own.

    Args:
        likelihood: of the targets.
        evaluated: the global model on all clients' test samples, and on each client's.
        clients: the clients' own models, each on its own test samples.
        between: number of clients, to report how metrics differ between them; 0: not reported.
        recent: clients that were evaluated in this round. If there are many clients, only these
            are listed one by one.
    """
    local = clients.means(likelihood)
    line: Metrics = {} if evaluated is None else dict(evaluated.line)
    line["local_accuracy"] = local.get("accuracy")
    line["local_clients"] = clients.tested
    line["metrics"] = {
        **({} if evaluated is None else {"global": evaluated.metrics}),
        **({"local": local} if local else {}),
    }
    if between:
        of_global = {} if evaluated is None else {"global": evaluated.clients}
        _add_between(line, {**of_global, "local": clients}, likelihood, between, recent)
    return line


def _add_between(
    line: Metrics,
    scores: Mapping[str, ClientScores],
    likelihood: Likelihood,
    clients: int,
    recent: Collection[int],
) -> None:
    """Put into a line what metrics of each client come to (`ClientSpread`).

    Beside tables of metrics such as `global_worst` these are `by_client`, the metrics of each
    client by the name of the model and the metric, None where there is none (of more than
    `MOST_LISTED` clients those of the round, with their indices), and `undefined`: of which
    clients' test rows a metric that was asked for has no value.
    """
    for whose, own in scores.items():
        told = ClientSpread(own.each(likelihood), likelihood)
        if not told.each:  # nobody was tried yet
            continue
        for kind in BETWEEN:
            if (whose, kind) != ("local", "mean"):  # which is the table `local`
                line["metrics"][f"{whose}_{kind}"] = getattr(told, kind)()
        if whose == "local" and clients > MOST_LISTED:
            told = ClientSpread(own.each(likelihood, recent), likelihood)
        if told.each:
            line.setdefault("by_client", {})[whose] = told.told(clients)
        if undefined := told.undefined():
            line.setdefault("undefined", {})[whose] = undefined


def round_line(
    result: Round, evaluation: Metrics, model: Tensors, network: Network, seconds: float
) -> Metrics:
    """The line of a round.

    Args:
        result: what the round did.
        evaluation: what the line says of models, as from `evaluation_line`.
        model: the global model.
        network: all clients' network.
        seconds: that the round took.
    """
    parameters, ledger = network.parameters(model), result.ledger
    troubles = {str(client): reason for client, reason in ledger.troubles.items()}
    outliers = {str(client): reason for client, reason in result.outliers.items()}
    spared = {"spared_down": result.bytes_saved_down, "spared_up": result.bytes_saved_up}
    link = {"link_down": ledger.link_down, "link_up": ledger.link_up}
    return {
        "round": result.number,
        **evaluation,
        "bytes_down": result.bytes_down,
        "bytes_up": result.bytes_up,
        "cohort": len(result.cohort),
        "refused": {str(client): reason for client, reason in ledger.refused.items()},
        "lost": {str(client): reason for client, reason in ledger.lost.items()},
        **({"troubles": troubles} if troubles else {}),
        "skipped": result.skipped,
        **({"outliers": outliers} if outliers else {}),
        **({"undone": result.undone} if result.undone else {}),
        "sparsity": sparsity(parameters),
        "model_parameters": parameter_count(parameters),
        "seconds": seconds,
        "reported": result.reported,
        "update": result.info,
        **(spared if any(spared.values()) else {}),
        **(link if any(link.values()) else {}),
    }


def wasted_round(line: Metrics) -> str:
    """Why a round came to nothing though reports came, in words: each was rejected, or the update
    undone. Empty if it did not.
    """
    refused, lost = line["refused"], line["lost"]
    if undone := line.get("undone"):
        return str(undone)
    if refused and len(refused) + len(lost) == line["cohort"]:
        client, reason = next(iter(refused.items()))
        return f"client {client}: {reason}"
    return ""


def of_noise_alone(line: Metrics) -> bool:
    """Whether nothing but noise made a round's update: no report of the cohort counted."""
    return "privacy" in line and len(line["refused"]) + len(line["lost"]) >= line["cohort"]


def troubles_of(lines: list[Metrics], *kinds: str) -> list[dict[str, Any]]:
    """What went wrong with whom and when, of the kinds `refused`, `lost`, `troubles` and
    `outliers`.
    """
    return [
        {"round": line["round"], "client": int(client), "reason": reason}
        for line in lines
        for kind in kinds
        for client, reason in line.get(kind, {}).items()
    ]
