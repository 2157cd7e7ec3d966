"""What run folders tell, whether their runs have ended or not."""

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbayes.data import FederatedData, Partition
from fedbayes.data.dataset import Rows
from fedbayes.errors import FedbayesError, RunError
from fedbayes.metrics import Calibration, calibrate, evaluate
from fedbayes.runs.build import bind_frozen, build_runtime, stored_data
from fedbayes.runs.config import Config
from fedbayes.runs.folder import Metrics, Progress, RunFolder
from fedbayes.tensors import Tensors, to, unpack


@dataclass(frozen=True)
class Record:
    """One run, as far as its folder tells it."""

    label: str
    """Its name among the others: the folder's, with as many of its parents as it takes."""
    folder: Path
    settings: dict[str, Any]
    """Its config, flat: `training.lr` to 0.05."""
    metrics: list[Metrics]
    """The lines of its rounds."""
    accuracies: dict[str, float] = field(default_factory=dict)
    """Of each client that was tried, the accuracy of the model it last reported, by name."""
    clients: tuple[str, ...] = ()
    """Names of the clients [S]."""
    train_sizes: Rows | None = None
    """Training samples of each client, int64 [S]."""
    test_sizes: Rows | None = None
    """Test samples of each client, int64 [S]."""
    classes: tuple[str, ...] = ()
    """Names of the classes [K]; none if neither the data set nor the run folder tells them."""
    counts: Rows | None = None
    """Training samples of each client and class, int64 [S, K]."""
    confusion: Rows | None = None
    """Of the global model on all clients' test samples: true and predicted class, int64 [K, K]."""
    calibration: Calibration | None = None
    """Of the global model on all clients' test samples."""
    headline: str = "global_accuracy"
    """Name of the accuracy that the method is judged by."""
    started: datetime | None = None
    """When its config was written, by the time of the file."""
    changed: datetime | None = None
    """When its last round was written, by the time of the file."""
    ending: str = "so far"
    """Why the run ended; `so far` if it has not."""
    notes: tuple[str, ...] = ()
    """What is not told, and why."""

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def last(self, figure: str) -> float | None:
        """The newest value of a figure of the rounds, if there is any."""
        known = self._with(figure)
        return float(known[-1][figure]) if known else None

    def last_round(self, figure: str) -> int:
        """The round that the newest value of a figure is of; 0 if there is none."""
        known = self._with(figure)
        return int(known[-1]["round"]) if known else 0

    def _with(self, figure: str) -> list[Metrics]:
        return [line for line in self.metrics if line.get(figure) is not None]

    def by_class(self) -> list[tuple[str, float | None]]:
        """Of each class its name and the newest accuracy of the global model on its test samples,
        None where there are none; nothing if no round tells.
        """
        lines = [line["class_accuracy"] for line in self.metrics if line.get("class_accuracy")]
        shares = lines[-1] if lines else []
        known = len(self.classes) == len(shares)
        names = self.classes if known else [str(label) for label in range(len(shares))]
        return list(zip(names, shares, strict=True))

    def total(self, figure: str) -> float:
        """The sum of a figure over the rounds."""
        return float(sum(line.get(figure, 0) for line in self.metrics))


Watch = Callable[[str], object]
"""Is told which run is being read."""


def gather(folders: Sequence[Path], watch: Watch = lambda _: None) -> list[Record]:
    """Read run folders.

    A run that goes on is told so far. What cannot be told (the data set is not here, the method
    is not installed) is left out, with a note that says why.

    Raises:
        RunError: a folder holds no run, is damaged, or is named twice.
    """
    runs = [RunFolder(folder) for folder in folders]
    for run in runs:
        _refuse_no_run(run)
    records = []
    for run, label in zip(runs, _labels(folders), strict=True):
        watch(f"reading {label}")
        records.append(_record(run, label))
    return records


def _refuse_no_run(run: RunFolder) -> None:
    if run.config_file.exists():
        return
    text = f"{run.path} holds no run: there is no {run.config_file.name}"
    if any(run.path.glob("*/config.toml")):
        text += f"; the runs are in its folders, name them as {run.path}/*/"
    raise RunError(text)


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart."""
    paths = [folder.resolve() for folder in folders]
    for path, count in Counter(paths).items():
        if count > 1:
            raise RunError(f"{path} is named twice; a run counts once")
    depths = [1] * len(paths)
    while True:
        labels = ["/".join(p.parts[-depth:]) for p, depth in zip(paths, depths, strict=True)]
        counts = Counter(labels)
        if max(counts.values(), default=1) == 1:
            return labels
        depths = [depth + (counts[label] > 1) for depth, label in zip(depths, labels, strict=True)]


def _record(run: RunFolder, label: str) -> Record:
    settings = _settings(run)
    metrics = run.metrics()
    notes = []
    rounds, planned = metrics[-1]["round"] if metrics else 0, settings.get("rounds", 0)
    if not rounds:
        notes.append("no round is complete yet")
    elif rounds < planned and not run.summary_file.exists():
        notes.append(f"{rounds} of {planned} rounds so far")
    refused = sum(len(line.get("refused", ())) for line in metrics)
    if refused:
        skipped = sum(bool(line.get("skipped")) for line in metrics)
        notes.append(f"{refused} reports were refused, {skipped} rounds ended without an update")
    told: dict[str, Any] = {
        "started": _written(run.config_file),
        "changed": _written(run.metrics_file),
    }
    if run.summary_file.exists():
        try:
            summary = run.summary()
            told["ending"] = summary.get("stopped_reason", "completed")
            told["headline"] = summary.get("headline", "global_accuracy")
            if (best := summary.get("best_round", rounds)) != rounds:
                notes.append(
                    f"what is told of models is of the last round; the saved one is of round {best}"
                )
        except FedbayesError as error:
            notes.append(f"how it ended is not known: {error}")
    progress = None
    try:
        division = Partition.load(run.partition_file)
        names = division.names
        told |= {
            "clients": names,
            "train_sizes": np.diff(division.train_offsets),
            "test_sizes": np.diff(division.test_offsets),
        }
        progress = run.progress()
        if progress is not None:
            told["accuracies"] = _accuracies(progress, names)
        elif rounds:
            notes.append("no accuracies of clients: it has no checkpoint")
    except FedbayesError as error:
        notes.append(f"no accuracies of clients: {error}")
    try:
        preprocessing = run.preprocessing()
        if preprocessing is not None:
            told["classes"] = preprocessing.classes
    except FedbayesError as error:
        notes.append(f"classes have no names: {error}")
    try:
        config = run.config().model_copy(update={"device": "auto"})
        method = config.build_method()
        told["headline"] = method.headline
        if not method.has_global_model:
            notes.append(f"under {method.name} only clients have models: there is no global one")
        data = stored_data(config, run)
        told |= {
            "clients": data.partition.names,
            "train_sizes": data.train_sizes(),
            "test_sizes": data.test_sizes(),
            "classes": data.classes,
            "counts": data.counts() if data.classes else None,
        }
        model = _model(run, config, progress)
        if model is not None and data.test_total:
            told["confusion"], told["calibration"] = _predicted(run, config, data, model)
            lost = data.test_total - int(told["confusion"].sum())
            if lost:
                notes.append(f"{lost} predictions of the global model are not finite")
    except FedbayesError as error:
        missing = "confusion matrix and no reliability diagram"
        if "counts" not in told:
            missing = f"split, no {missing}"
        notes.append(f"no {missing}: {error}")
    return Record(label, run.path, settings, metrics, notes=tuple(notes), **told)


def _written(file: Path) -> datetime | None:
    """When a file was written, in local time."""
    if not file.exists():
        return None
    return datetime.fromtimestamp(file.stat().st_mtime).astimezone()


def _settings(run: RunFolder) -> dict[str, Any]:
    """The config as it stands in the file: the method it names need not be installed here."""
    try:
        return dict(_flat(tomllib.loads(run.config_file.read_text())))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {run.config_file}: {error}") from None


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    entries: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            entries += _flat(value, f"{prefix}{key}.")
        else:
            entries.append((f"{prefix}{key}", value))
    return entries


def _accuracies(progress: Progress, names: Sequence[str]) -> dict[str, float]:
    tried = (progress.tested > 0).nonzero()[:, 0].tolist()
    shares = progress.correct.double() / progress.tested.clamp_min(1)
    return {names[client]: float(shares[client]) for client in tried}


def _model(run: RunFolder, config: Config, progress: Progress | None) -> Tensors | None:
    """The newest global model; None before the first round, or where there is never one."""
    if progress is not None:
        method = config.build_method()
        if not method.has_global_model:
            return None
        return method.model(unpack(method.server_state, progress.server))
    return run.model() if run.model_file.exists() else None


def _predicted(
    run: RunFolder, config: Config, data: FederatedData, model: Tensors
) -> tuple[Rows, Calibration]:
    """What the global model says of all clients' test samples.

    Returns:
        True and predicted classes [K, K], without predictions that are not finite; and the
        calibration of all, where these have confidence 0.
    """
    runtime = build_runtime(config, data)
    bind_frozen(run, runtime.network)
    device = runtime.network.device
    predict = runtime.method.predict(to(model, device), runtime.network)
    matrix = np.zeros((len(data.classes),) * 2, dtype=np.int64)
    confidence, right = [], []
    for start in range(0, data.test_total, _PIECE):
        samples = data.test_union(start, start + _PIECE)
        predictions = evaluate(predict, samples.to(device))
        finite = predictions.confidence > 0
        np.add.at(matrix, (samples.y[finite].numpy(), predictions.labels[finite].numpy()), 1)
        confidence.append(predictions.confidence)
        right.append(predictions.labels == samples.y)
    return matrix, calibrate(torch.cat(confidence), torch.cat(right))


_PIECE = 1000
"""Test samples that are predicted at a time."""
