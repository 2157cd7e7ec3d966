"""Quality of the uncertainty of a run's global model: how well it distinguishes wrong from right
predictions, and out-of-distribution inputs from its own.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedbayes.contracts import Sampler
from fedbayes.core.files import read_bytes, write_beside
from fedbayes.core.seals import sealed_table, unsealed_table
from fedbayes.core.tensors import Tensors, to
from fedbayes.likelihoods import Likelihood
from fedbayes.likelihoods.measures import MEASURES, auroc, fitting
from fedbayes.likelihoods.trust import PIECE, Trust, examine, unsure
from fedbayes.reports.charts import diagram
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.storage.calibrations import calibrated_model, own_temperature
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.scores import test_parts
from fedbayes.workflows.experiments.ood_inputs import foreign_file, foreign_inputs

FORMAT = "fedbayes-trial-1"
_POINTS = 101
"""Coverages of the curve of selective prediction."""


@dataclass(frozen=True)
class UncertaintyReport:
    """The global model of a run on its test samples, and on out-of-distribution (OOD) inputs."""

    asked: str
    """The OOD inputs that were asked for."""
    model: str = ""
    """Digest of the model; empty where there is no global one."""
    file: str = ""
    """Digest of the file of OOD inputs; empty if they are from no file."""
    foreign: str = ""
    """Description of the OOD inputs; empty if there are none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`brier` or `crps`; AUROC of uncertainties for errors, `error_auroc` of the entropy and
    `error_auroc_information`, and for OOD inputs, `ood_auroc` and `ood_auroc_information`;
    `aurc`, and `accuracy_at_80` of the most confident 80 %. What is undefined is left out."""
    reliability: tuple[tuple[float, float, int], ...] = ()
    """Mean confidence, accuracy and number of samples of bins with enough of them."""
    selective: tuple[float, ...] = ()
    """Accuracy of the most confident samples, at coverages 0.01, 0.02, … 1; for classes only."""
    format: str = FORMAT


def trial_file(folder: RunFolder) -> Path:
    """Where the trial of a run is kept."""
    return folder.path / "trial.json"


def try_model(folder: Path, asked: str) -> UncertaintyReport:
    """Evaluate the global model of a run, unless that has been done, and keep the result.

    Args:
        folder: of a run that has ended, with its data.
        asked: OOD inputs, as `foreign_inputs` takes them.

    Raises:
        FedbayesError: the data are not here, or there are no such inputs.
    """
    place = RunFolder(folder)
    file = foreign_file(asked)
    known = standing_trial(place, asked, file)
    if known is not None:
        return known
    config = place.config()
    method = config.build_method()
    model = _tried(place)
    found = UncertaintyReport(asked, model, file)
    data = stored_data(config, place, changed="refuse")
    # Asked for inputs that do not suit the samples are refused for methods without a model too.
    foreign = foreign_inputs(data, config.data, asked)
    if model and data.test_total:
        run = stored_run(place, config, data.preprocessing)
        device, likelihood = run.network.device, run.likelihood
        draw = method.draws(to(place.model(), device), run)
        tests = [(draw, part.to(device)) for part in test_parts(data, likelihood)]
        trust = examine(likelihood, tests, _measures(likelihood), own_temperature(place))
        assert trust is not None
        other: Tensors = {}
        if foreign is not None:
            other = _unsure(likelihood, draw, foreign.x, device)
        found = UncertaintyReport(
            asked,
            model,
            file,
            foreign.what if foreign is not None and other else "",
            _defined(_metrics(trust, other)),
            _reliability(trust),
            _selective(trust),
        )
    write_beside(trial_file(place), sealed_table(asdict(found)))
    return found


def standing_trial(folder: RunFolder, asked: str, file: str) -> UncertaintyReport | None:
    """Return the stored evaluation of a run, if its model and the OOD inputs are unchanged.

    Args:
        folder: of a run that has ended.
        asked: OOD inputs, as `foreign_inputs` takes them.
        file: digest of their file, as `foreign_file` has it.
    """
    known = stored_trial(folder)
    if known is None or (known.asked, known.file) != (asked, file):
        return None
    return known if known.model == _tried(folder) else None


def _tried(folder: RunFolder) -> str:
    """Digest of the model that there is to be tried; empty where there is no global one."""
    tells = folder.config().build_method().models.has_global
    return calibrated_model(folder, personal=False) if tells else ""


def stored_trial(folder: RunFolder) -> UncertaintyReport | None:
    """The trial of a run that was kept; None where there is none that can be read."""
    try:
        content = unsealed_table(read_bytes(trial_file(folder)))
        found = TypeAdapter(UncertaintyReport).validate_python(content)
    except (OSError, ValueError, ValidationError):
        return None
    return found if found.format == FORMAT else None


def _measures(likelihood: Likelihood) -> tuple[str, ...]:
    """Names of the metrics of all samples at once that a trial tells."""
    kind = likelihood.target.kind
    names = [name for name in ("brier", "error_auroc") if kind in MEASURES[name].kinds]
    if hasattr(likelihood, "crps") and kind == "real":
        names.append("crps")
    return fitting(names, likelihood)


@torch.no_grad()
def _unsure(likelihood: Likelihood, draw: Sampler, x: Tensor, device: torch.device) -> Tensors:
    """How uncertain a model is of these inputs."""
    each = [unsure(likelihood, draw(part.to(device))) for part in torch.split(x, PIECE)]
    return {name: torch.cat([one[name] for one in each]).cpu() for name in each[0]}


def _metrics(trust: Trust, other: Tensors) -> dict[str, float]:
    found = {name: value for name, value in trust.metrics.items() if name in _KEPT}
    for name, values in trust.unsure.items():
        end = "" if name in ("entropy", "std") else "_information"
        if trust.right is not None and end:
            found[f"error_auroc{end}"] = separation(values[trust.right], values[~trust.right])
        if name in other:
            found[f"ood_auroc{end}"] = separation(values, other[name])
    if trust.confidences is not None:
        found["aurc"] = trust.confidences.aurc
        found["accuracy_at_80"] = trust.confidences.accuracy_at(0.8)
    return found


_KEPT = ("brier", "crps", "error_auroc")


def separation(lower: Tensor, upper: Tensor) -> float:
    """AUROC of an uncertainty that is to be higher of the second; NaN where one is empty, or where
    all are the same, as under noise with one standard deviation.

    Args:
        lower: of samples of which a model should be sure, [n]; infinite where it predicts nothing.
        upper: of others, [m].
    """
    if not (len(lower) and len(upper)):
        return math.nan
    score = np.concatenate([lower.double().numpy(), upper.double().numpy()])
    if score.min() == score.max():
        return math.nan
    truth = np.repeat([False, True], [len(lower), len(upper)])
    return float(auroc(truth, np.nan_to_num(score, posinf=np.finfo(np.float64).max)))


def _defined(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _reliability(trust: Trust) -> tuple[tuple[float, float, int], ...]:
    if trust.calibration is None:
        return ()
    return tuple((b.confidence, b.accuracy, b.count) for b in diagram(trust.calibration).bins)


def _selective(trust: Trust) -> tuple[float, ...]:
    if trust.confidences is None:
        return ()
    shares = np.linspace(0, 1, _POINTS)[1:]
    return tuple(round(trust.confidences.accuracy_at(float(share)), 6) for share in shares)
