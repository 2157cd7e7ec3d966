"""How far the predictions of a run's model can be trusted."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import torch

from fedbayes.data.plot import save_figure
from fedbayes.errors import DataError, RunError
from fedbayes.metrics import (
    Calibration,
    Predictions,
    Sampler,
    Uncertainty,
    calibrate,
    evaluate,
    uncertainty,
)
from fedbayes.reports.charts import diagram
from fedbayes.reports.draw import reliability
from fedbayes.runs.build import bind_frozen, build_network, stored_data
from fedbayes.runs.folder import RunFolder
from fedbayes.runs.personal import own_samplers, require_global
from fedbayes.tensors import Samples

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


def trust(folder: Path, *, personal: bool = False, client: str | int | None = None) -> Trust:
    """Try the global model of a run that has ended, or clients' own on their own test sets.

    Args:
        folder: the run folder.
        personal: every client's own model.
        client: the own model of this one, by name or index.

    Raises:
        RunError: it has not ended, there are no test samples, or clients keep no own models.
    """
    run = RunFolder(folder)
    config = run.config()
    run.summary()  # it has ended
    method = config.build_method()
    chosen = None if client is None else run.find_client(client)
    if not personal and chosen is None:
        require_global(run, method)
    try:
        data = stored_data(config, run)
    except DataError as error:
        raise RunError(
            f"calibration is measured on the test samples of {folder}, which are not here: {error}"
        ) from None
    if not data.test_total:
        raise RunError(f"the clients of {folder} hold no test samples")
    network = build_network(config, data.shape, len(data.classes))
    bind_frozen(run, network)
    if personal or chosen is not None:
        own = list(own_samplers(run, method, network, chosen))
        tests = [(draw, data.test(number).to(network.device)) for number, draw in own]
        tried = [_try(draw, samples) for draw, samples in tests if len(samples.y)]
        if not tried:
            raise RunError(f"the clients asked for in {folder} hold no test samples")
        return _joined(tried)
    model = run.model()
    samples = data.test_union(0, data.test_total).to(network.device)
    draw = method.sampler(model, network)
    if draw is not None:
        return _joined([_try(draw, samples)])
    return _joined([_Tried(evaluate(method.predict(model, network), samples), samples)])


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
    figure = Figure(figsize=(4.6 * columns, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    reliability(panels[0], diagram(found.calibration))
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
    save_figure(figure, path)
