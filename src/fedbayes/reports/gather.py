"""What run folders tell, whether their runs have ended or not."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.config.config import Config, is_reference
from fedbayes.core.files import parse_toml, read_text
from fedbayes.core.metrics import Calibration, Confidences, Coverage
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Tensors, to, unpack
from fedbayes.core.wording import listed
from fedbayes.data import FederatedData
from fedbayes.data.dataset import Array, Rows
from fedbayes.errors import FedbayesError, RunError, told_as
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.federation.privacy.accounting import epsilons
from fedbayes.likelihoods import Likelihood, build_likelihood
from fedbayes.likelihoods.trust import examine
from fedbayes.runs.build import bind_frozen, build_runtime, stored_data
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.client_spread import per_client, tables
from fedbayes.storage.contributions import Contributions, contributions_file, read_contributions
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.inventory import dotted
from fedbayes.storage.metrics_file import Metrics
from fedbayes.storage.progress import Progress
from fedbayes.storage.scores import CLIENT_ROWS


@dataclass(frozen=True)
class Record:
    """One run, with the information of its folder."""

    label: str
    """Its name among the others: the folder's, with as many of its parents as it takes."""
    folder: Path
    settings: dict[str, Any]
    """Its config, flat: `training.lr` to 0.05."""
    metrics: list[Metrics]
    """The lines of its rounds, their metrics as entries: `global_accuracy`, `local_rmse`."""
    target: Target | None = None
    """What is predicted; None in folders of old versions."""
    metric: str = "accuracy"
    """The headline metric of its likelihood."""
    higher_is_better: bool = True
    """Whether a higher value of it is a better one."""
    values: dict[str, float] = field(default_factory=dict)
    """Of each client that was tried, the headline metric of the model it last reported, by name."""
    between: dict[str, Any] = field(default_factory=dict)
    """Metrics of each client and how they differ, as a summary has them (`runs.between`):
    `metrics`, `per_client`, `undefined`; empty where no round tells."""
    clients: tuple[str, ...] = ()
    """Names of the clients [S]."""
    reference: bool = False
    """Whether the data of the run are a server's reference table, and clients have their own."""
    train_sizes: Rows | Sequence[int | None] | None = None
    """Training samples of each client, int64 [S]; with a reference table as far as they said."""
    test_sizes: Rows | Sequence[int | None] | None = None
    """Test samples of each client, likewise."""
    classes: tuple[str, ...] = ()
    """Names of the classes [K]; none if neither the data set nor the run folder tells them."""
    counts: Rows | None = None
    """Training samples of each client and class, int64 [S, K]."""
    confusion: Rows | None = None
    """Of the global model on all clients' test samples: true and predicted class, int64 [K, K]."""
    calibration: Calibration | None = None
    """Of the global model's probabilities on all clients' test samples."""
    confidences: Confidences | None = None
    """Of classes, predictions counted by their confidence."""
    coverage: Coverage | None = None
    """Of the global model's intervals of numbers likewise."""
    predictions: tuple[Array, Array] | None = None
    """Of numbers: true values, and the global model's, of all clients' test samples [n, T]."""
    spent: tuple[tuple[int, dict[str, float]], ...] = ()
    """ε after some of the rounds, the last one among them, by which federations are neighbours."""
    whose: str = "global"
    """`global` or `local`: the model that the method is judged by, or the clients' own."""
    started: datetime | None = None
    """When its config was written, by the time of the file."""
    changed: datetime | None = None
    """When its last round was written, by the time of the file."""
    ending: str = "so far"
    """Why the run ended; `so far` if it has not."""
    notes: tuple[str, ...] = ()
    """What is not told, and why."""
    contributions: Contributions | None = None
    """Of its clients to the global model, where they were measured."""
    temperature: float | None = None
    """Of the global model after the last round; None where there is none."""
    final: dict[str, float] = field(default_factory=dict)
    """Metrics of the global model after the last round, at its temperature and without, by name;
    empty where it has none. Those of `metrics` are of models without."""

    @property
    def tried_at_clients(self) -> bool:
        """Whether metrics of the global model are those that clients reported."""
        return not self.reference or any(CLIENT_ROWS in line for line in self.metrics)

    @property
    def headline(self) -> str:
        """Name of the metric that the run is judged by, such as `global_accuracy`."""
        return f"{self.whose}_{self.metric}"

    @property
    def unit(self) -> str:
        """Names of the numbers that are predicted, in whose unit errors are; empty of others."""
        numbers = self.target is not None and self.target.kind in ("real", "count")
        return listed(self.target.names, 3) if self.target is not None and numbers else ""

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def last(self, metric: str) -> float | None:
        """The newest value of a metric, if there is any; at the temperature, if there is one."""
        if metric in self.final:
            return self.final[metric]
        known = self._with(metric)
        return float(known[-1][metric]) if known else None

    def last_round(self, metric: str) -> int:
        """The round that the newest value of a metric is of; 0 if there is none."""
        if metric in self.final:
            return self.rounds
        known = self._with(metric)
        return int(known[-1]["round"]) if known else 0

    def _with(self, metric: str) -> list[Metrics]:
        return [line for line in self.metrics if line.get(metric) is not None]

    def by_class(self) -> list[tuple[str, float | None]]:
        """Of each class its name and the newest accuracy of the global model on its test samples,
        None where there are none; nothing if no round tells.
        """
        lines = [line["class_accuracy"] for line in self.metrics if line.get("class_accuracy")]
        shares = lines[-1] if lines else []
        known = len(self.classes) == len(shares)
        names = self.classes if known else [str(label) for label in range(len(shares))]
        return list(zip(names, shares, strict=True))

    def total(self, metric: str) -> float:
        """The sum of a metric over the rounds."""
        return float(sum(line.get(metric, 0) for line in self.metrics))


SPENT_ROUNDS = 12
"""Largest number of rounds whose ε is reported, evenly spaced."""

Watch = Callable[[str], object]
"""Called with the run that is being read."""


def gather(folders: Sequence[Path], watch: Watch = lambda _: None) -> list[Record]:
    """Read run folders.

    A run that is still training is read up to its last round. Parts that cannot be read (the data
    set is missing, the method is not installed) are left out, and a note says why.

    Raises:
        RunError: a folder holds no run, is damaged, or is named twice.
    """
    runs = [RunFolder(folder) for folder in folders]
    for run in runs:
        run.require_run()
    records = []
    for run, label in zip(runs, labels_of(folders), strict=True):
        watch(f"reading {label}")
        records.append(deepened(run, rounds_of(run, label)))
    return records


def notes_on(records: Sequence[Record]) -> list[str]:
    """What is not told of runs, and why, with their names."""
    return [f"{record.label}: {note}" for record in records for note in record.notes]


def labels_of(folders: Sequence[Path]) -> list[str]:
    """The shortest path suffixes that distinguish the folders."""
    paths = [folder.resolve() for folder in folders]
    for path, count in Counter(paths).items():
        if count > 1:
            raise RunError(f"{path} is given twice. Give each run once")
    depths = [1] * len(paths)
    while True:
        labels = ["/".join(p.parts[-depth:]) for p, depth in zip(paths, depths, strict=True)]
        counts = Counter(labels)
        if max(counts.values(), default=1) == 1:
            return labels
        depths = [depth + (counts[label] > 1) for depth, label in zip(depths, labels, strict=True)]


def rounds_of(run: RunFolder, label: str) -> Record:
    """The information of a run's rounds and its summary; fast.

    Raises:
        RunError: its config or its lines are damaged.
    """
    settings = _settings(run)
    lines = run.metrics()
    metrics = [flat(line) for line in lines]
    notes = []
    rounds, planned = metrics[-1]["round"] if metrics else 0, settings.get("rounds", 0)
    if not rounds:
        notes.append("no round is complete yet")
    elif rounds < planned and not run.summary_file.exists():
        notes.append(f"{rounds} of {planned} rounds so far")
    elif not run.summary_file.exists():
        notes.append("the end of the run is unknown: it has no summary.json")
    refused = sum(len(line.get("refused", ())) for line in metrics)
    if refused:
        skipped = sum(bool(line.get("skipped")) for line in metrics)
        notes.append(f"{refused} reports were rejected, {skipped} rounds ended without an update")
    if wrong := settings.get("data.label_noise", 0):
        notes.append(f"label noise: {wrong:.1%} of the training labels are wrong")
    attack, hostile = settings.get("attack.kind", "none"), settings.get("attack.clients", 1)
    if attack != "none" and hostile:
        who = "1 malicious client" if hostile == 1 else f"{hostile} malicious clients"
        notes.append(f"{who}: attack {attack} from round {settings.get('attack.start', 1)} on")
    fields: dict[str, Any] = {
        "started": _written(run.config_file),
        "changed": _written(run.metrics_file),
    }
    if run.summary_file.exists():
        try:
            summary = run.summary()
            notes += _whose(summary)
            fields |= _calibrated(summary)
            if "warning" in summary:
                notes.append(summary["warning"])
            fields["ending"] = summary.get("stopped_reason", "completed")
            headline = summary.get("headline", "global_accuracy")
            fields["whose"], _, fields["metric"] = headline.partition("_")
            if (best := summary.get("best_round", rounds)) != rounds:
                notes.append(
                    f"metrics are from the last round; the saved model is from round {best}"
                )
        except FedbayesError as error:
            notes.append(f"the end of the run is unknown: {error}")
    return Record(label, run.path, settings, metrics, notes=tuple(notes), **fields)


def deepened(run: RunFolder, record: Record) -> Record:
    """The record with information of the data, the clients and the model; this may take a while.

    Args:
        run: the run folder.
        record: what its rounds tell; notes are added behind its own.

    Raises:
        RunError: the newest checkpoint is damaged.
    """
    settings, notes = record.settings, list(record.notes)
    reference = is_reference(settings.get("engine"), settings.get("data.name"))
    fields: dict[str, Any] = {"reference": reference}
    likelihood, progress = None, None
    try:
        likelihood = _add_target(run, settings, fields)
    except FedbayesError as error:
        notes.append(f"the target is unknown: {error}")
    try:
        if run.model_file.exists():
            run.model()
    except FedbayesError as error:
        notes.append(str(error))
    if (known := run.inventory()) is not None and known.headline:
        fields["whose"], _, fields["metric"] = known.headline.partition("_")
        fields["higher_is_better"] = known.higher_is_better
    try:
        _add_division(run, record, fields)
        progress = run.progress()
        notes += _add_values(run, record, likelihood, progress, fields)
    except FedbayesError as error:
        notes.append(f"no metrics of clients: {error}")
    try:
        fields["spent"] = _spent(run, settings, progress)
    except FedbayesError as error:
        notes.append(f"the privacy budget is unknown: {error}")
    try:
        if run.summary_file.exists() and contributions_file(run).exists():
            fields["contributions"] = read_contributions(run)
    except FedbayesError as error:
        notes.append(f"contributions of clients are not available: {error}")
    try:
        _add_predictions(run, record, progress, fields, notes)
    except FedbayesError as error:
        missing = "predictions of the global model"
        if "classes" not in fields:
            missing = f"split, no {missing}"
        notes.append(f"no {missing}: {error}")
    return replace(record, notes=tuple(notes), **fields)


def _add_target(
    run: RunFolder, settings: Mapping[str, Any], fields: dict[str, Any]
) -> Likelihood | None:
    """What is predicted, and its likelihood if that is no code of somebody's own."""
    preprocessing = run.preprocessing()
    if preprocessing is None:
        return None
    fields |= {"classes": preprocessing.classes, "target": preprocessing.target}
    if ":" in str(settings.get("task.likelihood", "")):
        return None
    likelihood = _likelihood(settings, preprocessing.target)
    fields |= {"metric": likelihood.metric, "higher_is_better": likelihood.higher_is_better}
    return likelihood


def _add_division(run: RunFolder, record: Record, fields: dict[str, Any]) -> None:
    """Names and sizes of clients, and how metrics differ between them."""
    division, names = run.partition(), run.client_names()
    if division is not None:
        fields |= {"clients": division.names}
        if fields["reference"]:  # the division is of the server's rows
            fields |= reported_sizes(run, len(division.names))
        else:
            fields |= {
                "train_sizes": np.diff(division.train_offsets),
                "test_sizes": np.diff(division.test_offsets),
            }
    if "target" in fields and not record.between:
        fields["between"] = _between(run.metrics(), names, fields["target"])


def _add_values(
    run: RunFolder,
    record: Record,
    likelihood: Likelihood | None,
    progress: Progress | None,
    fields: dict[str, Any],
) -> list[str]:
    """The headline metric of each client's own model; notes on what lacks."""
    if progress is not None and likelihood is not None:
        names, each = run.client_names(), progress.clients.each(likelihood)
        values = {names[c]: found[likelihood.metric] for c, found in each.items()}
        fields["values"] = {name: v for name, v in values.items() if math.isfinite(v)}
        if without := len(values) - len(fields["values"]):
            return [
                f"{without} of {len(values)} clients are not in the chart of clients: their "
                f"{likelihood.metric} is undefined, or not finite"
            ]
    elif progress is not None:
        return [f"no metrics of clients: {_untold(record.settings['task.likelihood'])}"]
    elif record.rounds:
        return [
            "no metrics of clients: it has no checkpoint in checkpoints/ to check its other files"
        ]
    return []


def _add_predictions(
    run: RunFolder,
    record: Record,
    progress: Progress | None,
    fields: dict[str, Any],
    notes: list[str],
) -> None:
    """What the data tell, and what the global model predicts of them."""
    settings = record.settings
    own = [settings[key] for key in _NAMES if ":" in str(settings.get(key, ""))]
    if text := run.free_changes():
        notes.append(text)
    run.refuse_changed_config()
    if function := settings.get("data.generator"):
        raise RunError(_untold(str(function)))
    if ":" in str(of_data := settings.get("data.name", "")):
        raise RunError(_untold(str(of_data)))
    config = _built_in(run, own).on("auto")
    data = stored_data(config, run)
    fields |= {"clients": data.partition.names, "classes": data.classes, "target": data.target}
    if fields["reference"]:
        notes.append(
            "predictions are for the server's reference table, not for clients; clients reported "
            "their own metrics"
        )
    else:
        fields |= {
            "train_sizes": data.train_sizes(),
            "test_sizes": data.test_sizes(),
            "counts": data.counts() if data.classes else None,
        }
    if own:
        raise RunError(_untold(own[0]))
    method = config.build_method()
    fields["whose"] = method.models.headline
    if not method.models.has_global:
        notes.append(f"under {method.name} only clients have models; there is no global one")
    runtime = build_runtime(config, data, quiet=True)
    model = _model(run, runtime, progress)
    if model is not None and data.test_total:
        bind_frozen(run, runtime.run.network)
        fields |= _predicted(runtime, data, model, record.temperature)
        lost = data.test_total - int(fields["confusion"].sum()) if "confusion" in fields else 0
        if lost:
            notes.append(f"{lost} predictions of the global model are not finite")


def _calibrated(summary: Metrics) -> dict[str, Any]:
    """What a summary tells of the calibrated global model, as entries of a record."""
    if summary.get("temperature") is None:
        return {}
    tables = {name: own for name, own in summary["metrics"].items() if name.startswith("global")}
    of = ("metrics", "per_client", "undefined", "positive_class")
    return {
        "temperature": summary["temperature"],
        "final": flat({"metrics": tables}),
        "between": {name: summary[name] for name in of if name in summary}
        if "per_client" in summary
        else {},
    }


def reported_sizes(run: RunFolder, clients: int) -> dict[str, list[int | None]]:
    """What clients said of how many samples they have: by the weights of their first reports, which
    methods that weight have of numbers of samples alone, and by their scores.

    Args:
        run: the run folder.
        clients: how many there are.

    Raises:
        RunError: the newest checkpoint is damaged.
    """
    if (progress := run.progress()) is None:
        return {}
    told = {
        "train_sizes": (progress.weights, "weight"),
        "test_sizes": (progress.clients.table, "count"),
    }
    return {
        name: [
            None if (row := table.row(client)) is None else int(table.columns[column][row])
            for client in range(clients)
        ]
        for name, (table, column) in told.items()
    }


def _between(lines: list[Metrics], names: Sequence[str], target: Target) -> dict[str, Any]:
    """Metrics of each client and how they differ, in the newest lines that tell."""
    each = per_client(lines, names, target)
    if not each:
        return {}
    whole: dict[str, Any] = {
        whose: next((m for x in reversed(lines) if (m := x.get("metrics", {}).get(whose))), {})
        for whose in ("global", "local")
    }
    return {"metrics": {**whole, **tables(lines)}, **each}


_NAMES = ("method.name", "model.name", "task.likelihood")
"""Settings that may name a class or function of the user's own."""


def _untold(name: str) -> str:
    """Why something is left out that a module of the user's own would tell."""
    return (
        f"{name} comes from the user's own module, which a report does not import. Use fedbayes "
        "calibrate or fedbayes evaluate"
    )


def _built_in(run: RunFolder, own: Sequence[str]) -> Config:
    """The settings of a run, those of its data alone where others name a user's own module."""
    if not own:
        return run.config()
    table = parse_toml(read_text(run.config_file))
    return Config.create(**{key: table[key] for key in ("seed", "data") if key in table})


def _whose(summary: Metrics) -> list[str]:
    """Whose reports were rejected, and whose networks were unlike the others."""
    counts = summary.get("refused_clients", {})
    refused = listed((f"{client} ({times})" for client, times in counts.items()), 5)
    strange = Counter(str(entry["client"]) for entry in summary.get("outliers", ()))
    unlike = listed((f"{client} ({times})" for client, times in strange.most_common()), 5)
    return [
        *([f"rejected reports, by client: {refused}"] if refused else []),
        *([f"outlier networks, by number of the client: {unlike}"] if unlike else []),
    ]


def _likelihood(settings: Mapping[str, Any], target: Target) -> Likelihood:
    """The likelihood of a run, whether its method is installed here or not."""
    task = {
        key.removeprefix("task."): value
        for key, value in settings.items()
        if key.startswith("task.")
    }
    return build_likelihood(task.pop("likelihood", "auto"), target, **task)


def _written(file: Path) -> datetime | None:
    """When a file was written, in local time."""
    if not file.exists():
        return None
    return datetime.fromtimestamp(file.stat().st_mtime).astimezone()


def _settings(run: RunFolder) -> dict[str, Any]:
    """The config as it stands in the file: the method it names need not be installed here."""
    with told_as(RunError, f"cannot read {run.config_file}", OSError, ValueError):
        settings = dotted(parse_toml(read_text(run.config_file)))
        return {key: value for key, value in settings if value != {}}


def _model(run: RunFolder, runtime: ClientRuntime, progress: Progress | None) -> Tensors | None:
    """The newest global model; None before the first round, or where there is never one."""
    method = runtime.method
    if progress is not None:
        if not method.models.has_global:
            return None
        return method.model(unpack(method.server_state, progress.server), runtime.run)
    return run.model() if run.model_file.exists() else None


def _spent(
    run: RunFolder, settings: Mapping[str, Any], progress: Progress | None
) -> tuple[tuple[int, dict[str, float]], ...]:
    """What a run has spent of privacy after some rounds; nothing where there is no noise."""
    # Sums over secret cohorts take seconds, so these are known after the last round alone.
    if progress is None or not (record := progress.privacy).rounds:
        return ()
    last = progress.round
    if ((record.levels[:, 2] > 0) & (record.levels[:, 2] < 1)).any():
        if run.summary_file.exists() and (told := run.summary().get("privacy")):
            known = {k: math.inf if e is None else e for k, e in told["epsilon"].items()}
            return ((last, known),)
        rounds = [last]
    else:
        rounds = np.linspace(1, last, min(last, SPENT_ROUNDS)).round().astype(int).tolist()
    delta = float(settings.get("privacy.delta", 0.0))
    return tuple((number, epsilons(record.spent(number), delta)) for number in rounds)


def _predicted(
    runtime: ClientRuntime, data: FederatedData, model: Tensors, temperature: float | None
) -> dict[str, Any]:
    """What the global model says of all test samples, as entries of a record."""
    run = runtime.run
    device = run.network.device
    draw = runtime.method.draws(to(model, device), run)
    samples = data.test_union(0, data.test_total).to(device)
    found = examine(run.likelihood, [(draw, samples)], temperature=temperature)
    if found is None:
        return {}
    fields: dict[str, Any] = {"calibration": found.calibration, "coverage": found.coverage}
    fields["confidences"] = found.confidences
    if found.predicted is None:
        return fields
    if not data.classes:
        return fields | {"predictions": (found.true.numpy(), found.predicted.numpy())}
    matrix = np.zeros((len(data.classes),) * 2, dtype=np.int64)
    finite = found.finite
    np.add.at(matrix, (found.true[finite].numpy(), found.predicted[finite].numpy()), 1)
    return fields | {"confusion": matrix}
