"""How far the predictions of a run's model can be trusted."""

from collections.abc import Sequence
from pathlib import Path

import torch

from fedbayes.core.tensors import to
from fedbayes.data.plot import save_figure
from fedbayes.errors import DataError, RunError, told_as
from fedbayes.likelihoods.measures import AUTO, check_names, fitting
from fedbayes.likelihoods.trust import Trust, examine
from fedbayes.reports.charts import coverage_curve, diagram
from fedbayes.reports.draw import draw_lines, reliability
from fedbayes.reports.palette import BLUE, LIGHT, ORANGE
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.runs.personal import own_models, require_global
from fedbayes.storage.calibrations import read_temperature
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.scores import test_parts


def trust(
    folder: Path,
    *,
    personal: bool = False,
    client: str | int | None = None,
    metrics: Sequence[str] = (AUTO,),
    temperature: bool = True,
) -> Trust:
    """Evaluate the global model of a run that has ended, or clients' own on their own test sets.

    Args:
        folder: the run folder.
        personal: every client's own model.
        client: the own model of this one, by name or index.
        metrics: names of metrics in addition to the likelihood's own (`likelihoods.measures`).
        temperature: whether probabilities are at the temperature of these models, if they have one.

    Raises:
        ConfigError: there is no such metric, or it is not for what is predicted.
        RunError: it has not ended, there are no test samples, or clients keep no own models.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.workflows.calibrate.calibration import summary, trust
        >>> result = fedbayes.run(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}, out="trusted"
        ... )
        >>> sorted(summary(trust(Path("trusted"))))[:3]
        ['accuracy', 'accuracy_at_0.5', 'accuracy_at_0.8']
    """
    check_names(metrics)
    folder_of_run = RunFolder(folder)
    folder_of_run.require_run()
    folder_of_run.summary()  # it has ended
    folder_of_run.refuse_changed_config()  # before anything that it names is imported
    config = folder_of_run.config()
    method = config.build_method()
    chosen = None if client is None else folder_of_run.find_client(client)
    if not personal and chosen is None:
        require_global(folder_of_run, method)
    with told_as(
        RunError,
        f"calibration needs the test samples of {folder}, which are not available",
        DataError,
    ):
        data = stored_data(config, folder_of_run)
    if not data.test_total:
        raise RunError(f"the clients of {folder} have no test samples")
    own = personal or chosen is not None
    cool = read_temperature(folder_of_run, personal=own) if temperature else None
    run = stored_run(folder_of_run, config, data.preprocessing)
    device = run.network.device
    if own:
        models = own_models(folder_of_run, method, run, chosen)
        pairs = [(model, data.test(number)) for number, model in models]
    else:
        model = to(folder_of_run.model(), device)
        pairs = [(model, part) for part in test_parts(data, run.likelihood)]
    tests = [(method.draws(m, run), s.to(device)) for m, s in pairs]
    found = examine(run.likelihood, tests, fitting(metrics, run.likelihood), cool)
    if found is None:
        raise RunError(f"the chosen clients of {folder} have no test samples")
    return found


def summary(found: Trust) -> dict[str, float]:
    """Return metrics by name, with those of calibration and uncertainty.

    Probabilities have:

    - `ece`, the expected calibration error.
    - `not_predicted`, the number of samples without a prediction, if there are any.

    Classes also have:

    - `accuracy_at_0.8`, the accuracy of the most confident share of predictions.
    - `aurc`, the area under the error rate over that share, by counts of confidence.
    - With a posterior, the mean entropy and mutual information (nats) of right and of wrong
      predictions.

    Numbers have, for each target column:

    - `coverage_0.9`, the share of targets in the central interval of each level.
    - `coverage_error`, its mean distance from the level.
    - `width_0.9`, the median width of the interval of 90 %.
    - The median standard deviation of predictions, and with a posterior that between draws.
    """
    metrics = dict(found.metrics)
    if found.calibration is not None:
        metrics["ece"] = found.calibration.error
        if found.calibration.untold:
            metrics["not_predicted"] = float(found.calibration.untold)
    if found.confidences is not None:
        metrics["aurc"] = found.confidences.aurc
        metrics |= {f"accuracy_at_{s:g}": found.confidences.accuracy_at(s) for s in COVERAGES}
    if found.uncertainty is not None and found.right is not None:
        for name, values in vars(found.uncertainty).items():
            for kind, chosen in (("right", found.right), ("wrong", ~found.right)):
                if len(told := values[chosen & values.isfinite()]):
                    metrics[f"{name}_{kind}"] = float(told.mean())
    if found.coverage is not None:
        places = {level: place for place, level in enumerate(found.coverage.levels)}
        shown = [level for level in _SHOWN if level in places] or list(places)
        metrics |= {f"coverage_{level:g}": found.coverage.inside[places[level]] for level in shown}
        metrics["coverage_error"] = found.coverage.error
        level = 0.9 if 0.9 in places else shown[-1]
        metrics |= _by_column(f"width_{level:g}", found, found.coverage.width[places[level]])
    for name, std in (("std", found.std), ("std_between", found.between)):
        if std is not None:
            metrics |= _by_column(name, found, std.median(dim=0).values.tolist())
    return metrics


def _by_column(name: str, found: Trust, values: Sequence[float]) -> dict[str, float]:
    """Numbers in the units of the target columns, named as metrics of columns are."""
    names = found.target.names
    return {
        f"{name}/{c}" if len(names) > 1 else name: v for c, v in zip(names, values, strict=True)
    }


COVERAGES = (0.5, 0.8, 0.9)
"""Shares of the most confident predictions whose accuracy is reported."""
_SHOWN = (0.5, 0.8, 0.9, 0.95)
"""Levels of intervals in a summary, of those that there are."""


def plot(found: Trust, path: Path) -> None:
    """Plot calibration.

    Probabilities have a reliability diagram, and with a posterior a panel for the uncertainty of
    right and wrong predictions. Numbers have the share of targets inside intervals.

    Raises:
        RunError: there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 1 if found.uncertainty is None else 2
    figure = Figure(figsize=(4.6 * columns, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    if found.coverage is not None:
        draw_lines(panels[0], coverage_curve(found.coverage))
    elif found.calibration is not None:
        reliability(panels[0], diagram(found.calibration))
    else:
        raise RunError("the likelihood gives neither probabilities nor intervals to draw")
    if found.uncertainty is not None and found.right is not None:
        axes = panels[1]
        values = found.uncertainty.entropy
        told = values.isfinite()  # of what is no prediction it is infinite
        edges = torch.linspace(0, max([1e-6, *values[told].tolist()]), 31).tolist()
        for chosen, label, colour in (
            (found.right, "right", LIGHT.hues[BLUE]),
            (~found.right, "wrong", LIGHT.hues[ORANGE]),
        ):
            if (chosen & told).any():
                axes.hist(
                    values[chosen & told].tolist(),
                    edges,
                    density=True,
                    alpha=0.6,
                    color=colour,
                    label=label,
                )
        axes.set(xlabel="entropy of the prediction, nats", ylabel="density")
        axes.legend()
    save_figure(figure, path)
