"""How far the predictions of a run's model can be trusted."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fedbayes.errors import RunError
from fedbayes.experiment.build import build_party, stored_data
from fedbayes.experiment.record import RunFolder
from fedbayes.metrics import Calibration, Uncertainty, calibrate, evaluate, uncertainty

PIECE = 500
"""Test samples that are predicted at a time."""


@dataclass(frozen=True)
class Trust:
    """A global model on the union of the clients' test sets."""

    accuracy: float
    nll: float
    """Mean negative log-likelihood, in nats."""
    calibration: Calibration
    right: torch.Tensor
    """Whether each prediction is right, bool [n]."""
    uncertainty: Uncertainty | None
    """For methods with a posterior, or an ensemble."""


def trust(folder: Path) -> Trust:
    """Try the global model of a run that has ended.

    Raises:
        RunError: it has not ended, or there are no test samples.
    """
    run = RunFolder(folder)
    model, config = run.model(), run.config()
    data = stored_data(config, run)
    if not data.test_total:
        raise RunError(f"the clients of {folder} hold no test samples")
    party = build_party(config, data)
    samples = data.test_union(0, data.test_total).to(party.network.device)
    found = evaluate(party.method.predict(model, party.network), samples)
    right = found.labels == samples.y.cpu()
    draw = party.method.sampler(model, party.network)
    parts: list[Uncertainty] = []
    if draw is not None:
        for start in range(0, len(samples.y), PIECE):
            with torch.no_grad():
                parts.append(uncertainty(draw(samples.x[start : start + PIECE])))
    return Trust(
        found.correct / found.count,
        found.nll / found.count,
        calibrate(found.confidence, right),
        right,
        _joined(parts),
    )


def _joined(parts: list[Uncertainty]) -> Uncertainty | None:
    if not parts:
        return None
    return Uncertainty(
        torch.cat([part.entropy for part in parts]).cpu(),
        torch.cat([part.information for part in parts]).cpu(),
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
