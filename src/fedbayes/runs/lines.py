"""What a line of `metrics.jsonl` says of a round."""

from typing import Any

from fedbayes.federation.round import Round
from fedbayes.likelihoods import Likelihood
from fedbayes.models import Network
from fedbayes.runs.folder import Metrics
from fedbayes.runs.scores import ClientScores, GlobalEvaluation
from fedbayes.tensors import Tensors, parameter_count, sparsity

GLOBAL = frozenset(
    ("global_accuracy", "global_nll", "global_ece", "class_accuracy", "attack_success")
)
"""Metrics of the global model on the union of the clients' test sets."""
_OURS = GLOBAL | {"stopped", "metrics", "troubles", "link_down", "link_up"}
"""What a line says in some rounds alone, and no client may say for us."""


def evaluation_line(
    likelihood: Likelihood, evaluated: GlobalEvaluation | None, clients: ClientScores
) -> Metrics:
    """What a line says of the global model, if it was evaluated, and of the clients' own."""
    local = clients.means(likelihood)
    line: Metrics = {} if evaluated is None else dict(evaluated.line)
    line["local_accuracy"] = local.get("accuracy")
    line["local_clients"] = clients.tested
    line["metrics"] = {
        **({} if evaluated is None else {"global": evaluated.metrics}),
        **({"local": local} if local else {}),
    }
    return line


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
    link = {"link_down": ledger.link_down, "link_up": ledger.link_up}
    # No client can name a metric as one of ours.
    info = {
        name: value
        for name, value in result.info.items()
        if name not in _OURS and not name.startswith(("global_", "local_"))
    }
    return {
        **info,
        "round": result.number,
        **evaluation,
        "bytes_down": result.bytes_down,
        "bytes_up": result.bytes_up,
        "cohort": len(result.cohort),
        "refused": {str(client): reason for client, reason in ledger.refused.items()},
        "lost": {str(client): reason for client, reason in ledger.lost.items()},
        **({"troubles": troubles} if troubles else {}),
        "skipped": result.skipped,
        "sparsity": sparsity(parameters),
        "model_parameters": parameter_count(parameters),
        "seconds": seconds,
        **(link if any(link.values()) else {}),
    }


def troubles_of(lines: list[Metrics], *kinds: str) -> list[dict[str, Any]]:
    """What went wrong with whom and when.

    Args:
        lines: of the rounds.
        kinds: any of `refused`, `lost` and `troubles`.
    """
    return [
        {"round": line["round"], "client": int(client), "reason": reason}
        for line in lines
        for kind in kinds
        for client, reason in line.get(kind, {}).items()
    ]
