"""What came of the rounds of a run: `summary.json`."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedbayes.config.config import Config
from fedbayes.contracts import Models
from fedbayes.contracts.returned import stopped
from fedbayes.core.lazy import shown
from fedbayes.core.tensors import parameter_count, sparsity
from fedbayes.federation.attacks.adversary import SUCCESS
from fedbayes.runs.calibration import CalibratedRun
from fedbayes.runs.chance import warning
from fedbayes.runs.lines import GLOBAL, evaluation_line, of_noise_alone, troubles_of
from fedbayes.runs.privacy import run_summary
from fedbayes.runs.turns import time_line
from fedbayes.storage.client_spread import per_client, tables
from fedbayes.storage.folder import NO_UPDATE
from fedbayes.storage.metrics_file import Metrics
from fedbayes.storage.scores import CLIENT_ROWS, REFERENCE_ROWS, ClientScores, GlobalEvaluation

if TYPE_CHECKING:
    from fedbayes.runs.simulation import Simulation

BEFORE = "global_uncalibrated"
"""The table of metrics of the global model before calibration, where it has a temperature."""
_BEST = (*sorted(GLOBAL), "metrics", "local_accuracy", "sparsity", "model_parameters")
"""Metrics of the best round; those of the last have the same names less `best_`."""


_SCORES = ("global_accuracy", "global_nll", "global_ece", "class_accuracy")
"""Metrics of the global model that stand by themselves."""


def _troubles(simulation: "Simulation", lines: list[Metrics]) -> Metrics:
    """What became of reports that did not count."""
    return {
        "refused_reports": simulation.progress.refused,
        "refused_clients": _refused(simulation, lines),
        "lost_reports": sum(len(line.get("lost", {})) for line in lines),
        "losses": troubles_of(lines, "refused", "lost"),
        "troubles": troubles_of(lines, "troubles"),
        "outliers": troubles_of(lines, "outliers"),
        "skipped_rounds": sum(line["skipped"] for line in lines),
    }


def summarize(simulation: "Simulation") -> Metrics:
    """The summary of a run after the rounds that it had so far."""
    config, progress, method = simulation.config, simulation.progress, simulation.method
    model = method.model(simulation.server, simulation.run)
    parameters = simulation.network.parameters(model)
    lines = simulation.folder.metrics()
    calibrated = simulation.calibrator.of(progress.round)
    before = next((line for line in reversed(lines) if "global" in line["metrics"]), {})
    last, between = before, lines
    local = progress.clients.means(simulation.likelihood)
    if calibrated is not None and (found := calibrated.evaluation) is not None:
        if method.reports.pooled or method.models is Models.COPIED:  # clients' own is this one
            local = found.clients.means(simulation.likelihood)
        last = _line(simulation, found)
        between = [*lines, last]
    measured = last["metrics"]["global"] if last else {}
    place, _, name = simulation.headline.partition("_")
    summary = {
        "method": shown(config.method["name"]),
        "headline": simulation.headline,
        "likelihood": simulation.likelihood.name,
        "dataset": simulation.data.dataset.name,
        "model": shown(config.model.name),
        "clients": simulation.data.clients,
        "partition": simulation.scheme,
        "cohort": simulation.cohort,
        "rounds": progress.round,
        **({"model_round": simulation.kept.round} if method.models.has_global else {}),
        "seed": config.seed,
        "precision": config.precision,
        "settings_chosen": config.settings_chosen,
        **{score: last.get(score) for score in _SCORES},
        "local_accuracy": local.get("accuracy"),
        simulation.headline: (local if place == "local" else measured).get(name),
        "metrics": {
            "global": measured,
            **({BEFORE: before["metrics"]["global"]} if last is not before else {}),
            "local": local,
            **tables(between),
        },
        **{name: last[name] for name in (REFERENCE_ROWS, CLIENT_ROWS) if name in last},
        **per_client(between, simulation.data.names, simulation.likelihood.target),
        "temperature": None if calibrated is None else calibrated.temperature,
        **({} if config.calibration == "none" else _calibration(calibrated)),
        "bytes_down": progress.bytes_down,
        "bytes_up": progress.bytes_up,
        **_compression(config, lines),
        **{way: sum(line.get(way, 0) for line in lines) for way in ("link_down", "link_up")},
        **_best(simulation, lines),
        **_troubles(simulation, lines),
        **_label_noise(simulation),
        **_attack(simulation, before),
        **({"noise_rounds": sum(map(of_noise_alone, lines))} if config.privacy.noise else {}),
        **run_summary(config, progress.privacy, progress.round),
        "sparsity": sparsity(parameters),
        "model_parameters": parameter_count(parameters),
        **time_line(lines),
        "seconds": progress.seconds,
        "seconds_per_round": statistics.median([line["seconds"] for line in lines] or [0.0]),
        "engine": config.engine,
        "stopped_reason": _reason(simulation, lines),
        "folder": str(simulation.folder.path),
    }
    said = warning(summary, simulation.data.target)
    return summary | ({"warning": said} if said else {})


def _line(simulation: "Simulation", evaluated: GlobalEvaluation) -> Metrics:
    """What a line of metrics would tell of an evaluation of the global model alone."""
    clients = simulation.data.clients
    return evaluation_line(simulation.likelihood, evaluated, ClientScores(), between=clients)


def _calibration(found: CalibratedRun | None) -> Metrics:
    """What the temperature is of, or why there is none."""
    found = found or CalibratedRun(reason="the run was interrupted")
    of = ("reason", "rows", "left_out", "clients", "bytes_down", "bytes_up")
    table = {name: value for name in of if (value := getattr(found, name))}
    if found.missed:
        table["missed"] = {str(client): why for client, why in found.missed.items()}
    return {"calibration": table}


def _compression(config: Config, lines: Sequence[Metrics]) -> Metrics:
    """The bytes of all messages as shares of what they would have been uncompressed."""
    if not config.compression.active:
        return {}
    found: Metrics = {}
    for way in ("down", "up"):
        sent = sum(line[f"bytes_{way}"] for line in lines)
        whole = sent + sum(line.get(f"spared_{way}", 0) for line in lines)
        found[way] = sent / whole if whole else 1.0
    return {"compressed": found}


def _refused(simulation: "Simulation", lines: Sequence[Metrics]) -> dict[str, int]:
    """How many reports of each client were rejected, by its name in the partition."""
    names = simulation.data.names
    found = Counter(int(client) for line in lines for client in line["refused"])
    return {names[client]: count for client, count in sorted(found.items())}


def _best(simulation: "Simulation", lines: Sequence[Metrics]) -> Metrics:
    """The best round and its metrics, where its checkpoint is kept."""
    if simulation.best is None:
        return {}
    number = simulation.best.round
    line = next(line for line in lines if line["round"] == number)
    found = simulation.calibrator.of(number)
    if found is not None and found.evaluation is not None:
        told = _line(simulation, found.evaluation)
        metrics = {BEFORE: line["metrics"]["global"], **told["metrics"]}
        line = {**line, **{name: told[name] for name in GLOBAL if name in told}}
        line["metrics"] = {**line["metrics"], **metrics}
    return {
        "best_round": number,
        **{f"best_{name}": line[name] for name in _BEST if name in line},
        **({} if found is None else {"best_temperature": found.temperature}),
    }


def _label_noise(simulation: "Simulation") -> Metrics:
    """How many training labels were replaced, if any were to be."""
    if not simulation.config.data.label_noise:
        return {}
    data = simulation.data
    return {"label_noise": {"labels": data.wrong_labels, "of": int(data.train_sizes().sum())}}


def _attack(simulation: "Simulation", last: Metrics) -> Metrics:
    """What attacked the run, and how far it got with test samples that it aimed at."""
    adversary = simulation.adversary
    if adversary is None:
        return {}
    return {
        "attack": {
            **adversary.settings.model_dump(exclude_defaults=True),
            "clients": sorted(adversary.clients),
            "start": adversary.settings.start,
        },
        **({SUCCESS: last[SUCCESS]} if SUCCESS in last else {}),
    }


def _reason(simulation: "Simulation", lines: Sequence[Metrics]) -> str:
    """Why there are no more rounds: the server's words, or that they are all done."""
    done = simulation.progress.round >= simulation.config.rounds
    if (done or simulation.stopped) and all(line["skipped"] for line in lines):
        return NO_UPDATE
    words = stopped(simulation.server) or simulation.stopped
    return words or ("completed" if done else "interrupted")
