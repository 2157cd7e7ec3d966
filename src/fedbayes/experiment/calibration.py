"""How far the predictions of a run's model can be trusted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import torch

from fedbayes.errors import MessageError, RunError
from fedbayes.experiment.build import build_party, stored_data
from fedbayes.experiment.flower import require_flower
from fedbayes.experiment.record import ClientStates, RunFolder
from fedbayes.federation.party import Party
from fedbayes.messages import decode, dense
from fedbayes.metrics import (
    Calibration,
    Predictions,
    Sampler,
    Uncertainty,
    calibrate,
    evaluate,
    uncertainty,
)
from fedbayes.tensors import Samples, to, unpack

PIECE = 500
"""Test samples that are predicted at a time."""


@dataclass(frozen=True)
class Trust:
    """Predictions on the union of the clients' test sets."""

    accuracy: float
    nll: float
    """Mean negative log-likelihood, in nats."""
    calibration: Calibration
    right: torch.Tensor
    """Whether each prediction is right, bool [n]."""
    uncertainty: Uncertainty | None
    """For methods with a posterior, or an ensemble."""


def trust(folder: Path, *, personal: bool = False) -> Trust:
    """Try the global model of a run that has ended, or every client's own on its own test set.

    Raises:
        RunError: it has not ended, there are no test samples, or clients keep no own models.
    """
    run = RunFolder(folder)
    run.summary()  # it has ended
    config = run.config()
    data = stored_data(config, run)
    if not data.test_total:
        raise RunError(f"the clients of {folder} hold no test samples")
    party = build_party(config, data)
    if personal:
        return _joined([_try(draw, samples) for draw, samples in _own(run, party)])
    model = run.model()
    samples = data.test_union(0, data.test_total).to(party.network.device)
    draw = party.method.sampler(model, party.network)
    if draw is not None:
        return _joined([_try(draw, samples)])
    return _joined([_Tried(evaluate(party.method.predict(model, party.network), samples), samples)])


def _own(run: RunFolder, party: Party) -> Iterator[tuple[Sampler, Samples]]:
    """Of every client that keeps a model: its draws between rounds, and its test samples."""
    method, device = party.method, party.network.device
    progress = run.progress(run.summary().get("best_round"))
    if progress is None:
        raise RunError(f"{run.path} has no checkpoint")
    engine = run.config().engine
    if engine == "flower":
        raise RunError(f"the clients' own models of {run.path} are with their nodes")
    server: Any = unpack(method.server_state, progress.server)
    states = ClientStates(run.clients, progress.stored)
    found = False
    for client, state in states.items():
        message = {name: item.to(device) for name, item in method.message(server, client).items()}
        if engine == "flower-simulation":
            state = _with_its_node(run, client, state)
        try:
            own: Any = unpack(method.client_state, to(dense(decode(state)), device))
        except MessageError as error:
            raise RunError(
                f"the private state of client {client} in {run.path} is damaged: {error}"
            ) from None
        draw = method.personal_sampler(message, own, party.network)
        samples = party.data.test(client).to(device)
        if draw is not None and len(samples.y):
            found = True
            yield draw, samples
    if not found:
        raise RunError(
            f"clients under {method.name} keep no models of their own between rounds; "
            "virtual and local do"
        )


def _with_its_node(run: RunFolder, client: int, ticket: bytes) -> bytes:
    require_flower()
    from fedbayes.federation.flower import StateStore

    return StateStore(run.path / "nodes" / str(client)).load(ticket, client)


@dataclass(frozen=True)
class _Tried:
    """What was predicted for some samples."""

    found: Predictions
    samples: Samples
    uncertainty: Uncertainty | None = None


def _try(draw: Sampler, samples: Samples) -> _Tried:
    """The mean prediction of the draws, and how they disagree."""
    parts: list[Uncertainty] = []

    def predict(x: torch.Tensor) -> torch.Tensor:
        each = draw(x)
        parts.append(uncertainty(each))
        return torch.logsumexp(each, dim=0) - log(len(each))

    found = evaluate(predict, samples, PIECE)
    joined = Uncertainty(
        torch.cat([part.entropy for part in parts]).cpu(),
        torch.cat([part.information for part in parts]).cpu(),
    )
    return _Tried(found, samples, joined)


def _joined(parts: Sequence[_Tried]) -> Trust:
    right = torch.cat([part.found.labels == part.samples.y.cpu() for part in parts])
    confidence = torch.cat([part.found.confidence for part in parts])
    unsure = [part.uncertainty for part in parts if part.uncertainty is not None]
    return Trust(
        sum(part.found.correct for part in parts) / len(right),
        sum(part.found.nll for part in parts) / len(right),
        calibrate(confidence, right),
        right,
        Uncertainty(
            torch.cat([one.entropy for one in unsure]),
            torch.cat([one.information for one in unsure]),
        )
        if unsure
        else None,
    )


def summary(found: Trust) -> dict[str, float]:
    """Figures by name; entropy and mutual information (nats) of right and wrong predictions."""
    figures = {
        "accuracy": found.accuracy,
        "nll": found.nll,
        "ece": found.calibration.error,
    }
    if found.uncertainty is not None:
        for name, values in vars(found.uncertainty).items():
            for kind, chosen in (("right", found.right), ("wrong", ~found.right)):
                if chosen.any():
                    figures[f"{name}_{kind}"] = float(values[chosen].mean())
    return figures


def plot(found: Trust, path: Path) -> None:
    """A reliability diagram; with a posterior, the uncertainty of right and wrong predictions."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 1 if found.uncertainty is None else 2
    figure = Figure(figsize=(4.4 * columns, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    bins, axes = found.calibration, panels[0]
    filled = bins.count > 0
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", label="perfect")
    size = 20 + 180 * (bins.count / bins.count.max()).sqrt()
    axes.plot(bins.confidence[filled], bins.accuracy[filled], color="#0072B2")
    axes.scatter(
        bins.confidence[filled], bins.accuracy[filled], s=size[filled], color="#0072B2", alpha=0.7
    )
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    axes.set_title(f"calibration error {bins.error:.3f}", fontsize="medium")
    axes.grid(alpha=0.3)
    if found.uncertainty is not None:
        axes = panels[1]
        values = found.uncertainty.entropy
        edges = torch.linspace(0, max(float(values.max()), 1e-6), 31).tolist()
        for chosen, label, colour in (
            (found.right, "right", "#0072B2"),
            (~found.right, "wrong", "#D55E00"),
        ):
            if chosen.any():
                axes.hist(
                    values[chosen].tolist(),
                    edges,
                    density=True,
                    alpha=0.6,
                    color=colour,
                    label=label,
                )
        axes.set(xlabel="entropy of the prediction, nats", ylabel="density")
        axes.legend()
    figure.savefig(path, dpi=150)
