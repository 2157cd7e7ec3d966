"""Running: rounds until the end, with everything recorded."""

import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedbayes.contracts import AnyMethod, Run
from fedbayes.data import choose_scheme
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError, RunError
from fedbayes.federation import aggregation, secure
from fedbayes.federation.aggregation import epsilon, noise_stream, require_accounting
from fedbayes.federation.client_runtime import ClientRuntime, Evaluation
from fedbayes.federation.engine_table import ENGINES, start
from fedbayes.federation.engines import Engine
from fedbayes.federation.round import Round, run_round, sample_cohort
from fedbayes.fields import idle
from fedbayes.messages import encode
from fedbayes.runs.activity import EVALUATING, TRAINING, Activity, Notify, unnoticed
from fedbayes.runs.build import (
    build_data,
    build_runtime,
    note_start,
    stored_data,
)
from fedbayes.runs.card import Card
from fedbayes.runs.config import Config
from fedbayes.runs.folder import (
    NO_UPDATE,
    ClientStates,
    Metrics,
    Progress,
    RunFolder,
    first_progress,
)
from fedbayes.runs.scores import ClientScores, GlobalEvaluation
from fedbayes.runs.standing import Standing
from fedbayes.tensors import Tensors, pack, parameter_count, sparsity, unpack

_EVALUATION = frozenset(("global_accuracy", "global_nll", "global_ece", "class_accuracy"))
"""Metrics of the global model on the union of the clients' test sets."""
_OURS = _EVALUATION | {"stopped", "metrics"}
"""What a line says in some rounds alone, and no client may say for us."""
_BEST = (*sorted(_EVALUATION), "metrics", "local_accuracy", "sparsity", "model_parameters")
"""Figures of the best round in the summary; those of the last have the same names less `best_`."""
EVALUATION_ROWS = 1000
"""Test samples in one piece of an evaluation: the same on every engine, so are the sums."""


@dataclass(frozen=True)
class Step:
    """One round of a simulation as it goes by."""

    number: int
    """The round, from 1."""
    server: Any
    """The server's state after it."""
    metrics: Metrics
    """The line of `metrics.jsonl`."""


class Simulation:
    """A run, round by round.

        with Simulation(config) as simulation:
            for step in simulation:
                print(step.number, step.metrics["global_accuracy"], step.server)

    Args:
        config: the settings; None to go on with the run that the folder holds.
        folder: the run folder; a temporary one if None.
        engine: starts the engine, in place of the one that the config names (`ENGINES`).
        notify: is told what the run is busy with: at the start, and client by client.
    """

    def __init__(
        self,
        config: Config | None = None,
        folder: Path | str | None = None,
        *,
        engine: "Callable[[Simulation], Engine] | None" = None,
        notify: Notify = unnoticed,
    ) -> None:
        self._notify = notify
        self.temporary: object = None
        """Keeps a temporary folder as long as it lives; None where the folder is the user's."""
        if folder is None:
            self.temporary = temporary = tempfile.TemporaryDirectory(prefix="fedbayes-")
            folder = temporary.name
        self.folder = RunFolder(Path(folder))
        if config is not None:
            self.folder.refuse_second_run()
        self.config = config or self.folder.config()
        notify(Activity(f"loading {self.config.data.path or self.config.data.name}"))
        self.data = (
            build_data(config)
            if config
            else stored_data(self.config, self.folder, changed="refuse")
        )
        notify(Activity("building the network"))
        self.runtime: ClientRuntime = build_runtime(self.config, self.data)
        self.method: AnyMethod = self.runtime.method
        self.run: Run = self.runtime.run
        self.likelihood = self.run.likelihood
        self.network = self.run.network
        self.clients, self.cohort = self.run.clients, self.run.cohort
        if not self.network.split()[0]:
            raise ModelError(f"model {self.config.model.name!r} has no parameter that is trained")
        self.method.check(self.run)
        self._check_reports()
        self._check_headline()
        if self.config.aggregation.noise:
            require_accounting()
        first = None
        if config is not None:
            first = self._first()
            note_start(config, self.data.preprocessing)
            for remark in self._remarks():
                warnings.warn(remark, FedbayesWarning, stacklevel=2)
        # Only now is the config known to be sound: a mistake leaves no folder behind.
        self.folder.create(self.config, self.data.partition, self.data.preprocessing)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(self.config.threads)
        self._blas = threadpool_limits(self.config.threads, user_api="blas")
        self._start_engine = engine or partial(start, self.config.engine)
        self.stop = False
        """Set it to end after the round under way."""
        self._engine: Engine | None = None
        try:
            self._open(first)
        except BaseException:
            self.close()
            raise

    def _check_reports(self) -> None:
        """See that rounds can have as many reports as are asked for, and what is done with them.

        Raises:
            ConfigError: they cannot.
        """
        needed, config = self.config.min_reports, self.config
        if not self.method.pooled and needed > self.cohort:
            raise ConfigError(
                f"min_reports = {needed}, but a round of this run has {self.cohort} clients: no "
                "round would count"
            )
        aggregation.check(
            config.aggregation,
            self.method,
            self.network,
            min_reports=needed,
            checkpoint_every=config.checkpoint_every,
        )
        secure.check(
            config.secure,
            self.method,
            config.aggregation,
            self.network.initial,
            engine=config.engine,
            cohort=self.cohort,
        )

    def _remarks(self) -> list[str]:
        """What a user should know before the first round."""
        config, method = self.config, self.method
        told = []
        if config.data.limit_test is not None and self.data.dataset.official_train is None:
            told.append("data.limit_test has no effect: there is no official test part")
        if method.pooled and (config.cohort != 1.0 or config.min_reports > 1):
            told.append(f"cohort and min_reports have no effect: {method.name} pools all data")
        if not method.has_global_model and config.evaluate_every != 1:
            told.append(f"evaluate_every has no effect: {method.name} has no global model")
        if not ENGINES[config.engine].exact:
            told.append(
                f"engine {config.engine!r} does not round as the others do: on them this config "
                "ends with slightly other numbers"
            )
        return [
            *told,
            *idle(self.config, resolved={"data.partition": self.scheme}),
            *idle(self.method, "method."),
            *self.method.remarks(self.run),
        ]

    @property
    def scheme(self) -> str:
        """How the data were divided, also where the config leaves it to the data."""
        return choose_scheme(self.data.dataset, self.config.data)

    def _check_headline(self) -> None:
        """See that the headline figure is told by rounds, where something depends on it.

        Raises:
            ConfigError: it is not.
        """
        config = self.config
        if config.stop_after is not None:
            name = f"stop_after = {config.stop_after}"
        elif self._keeps_best:
            name = "keep_checkpoints = 'best'"
        else:
            return
        if not self.data.test_total:
            raise ConfigError(f"{name} compares metrics, but no client has test samples")
        if self.method.headline == "global" and not config.evaluate_every:
            raise ConfigError(
                f"{name} compares metrics of the global model, but with evaluate_every = 0 only "
                "the last round is evaluated; set evaluate_every to 1 or more"
            )

    def _first(self) -> Progress:
        """The state before the first round."""
        server = self.method.init(self.run)
        return first_progress(pack(server), self.data.clients, self.network.constants_digest)

    def _open(self, first: Progress | None) -> None:
        """Take up the last complete round, or start at none."""
        found = self.folder.progress() or first or self._first()
        if found.constants != self.network.constants_digest:
            raise RunError(
                f"frozen weights of the network are not those that {self.folder.path} began with; "
                "put its code and files back as they were, or start a new run"
            )
        self.progress: Progress = found
        self._saved = found.round
        self.server: Any = unpack(self.method.server_state, found.server)
        self.folder.drop_metrics_after(found.round)
        lines = self.folder.metrics()
        self._standing = Standing(
            self.method.headline,
            self.likelihood.metric,
            self.likelihood.higher_is_better,
            self.config.stop_min_improvement,
        ).after_all(lines)
        self._stopped: str = lines[-1].get("stopped", "") if lines else ""
        self._best: Progress | None = None
        if self._keeps_best and self._standing.best_round:
            self._best = self.folder.progress(self._standing.best_round)
        self.states = ClientStates(self.folder.clients, found.stored)
        self.states.round = found.round
        self.states.remove_strays(
            keep_older=self.config.keep_checkpoints == "all",
            best=self._best_stored,
        )

    @property
    def _keeps_best(self) -> bool:
        return self.config.keep_checkpoints == "best"

    @property
    def _best_stored(self) -> Tensor | None:
        """Of each client, the round of its state in the best checkpoint, if that is kept."""
        return None if self._best is None else self._best.stored

    @property
    def engine(self) -> Engine:
        """Who runs the clients; started when first needed."""
        if self._engine is None:
            self._notify(Activity(f"starting {self.config.engine}", self.progress.round))
            self._engine = self._start_engine(self)
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and give back what the run borrowed of this process."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        torch.set_num_threads(self._threads)
        self._blas.restore_original_limits()

    def __iter__(self) -> Iterator[Step]:
        """Run the rounds that remain. After the last one the summary is written."""
        if not self.over and not self.stop:
            self.folder.reopen()
        while not self.over and not self.stop:
            yield self._step(self.progress.round + 1)
        if self._saved < self.progress.round:
            self.checkpoint()
        if self.progress.round:
            kept = self._best or self.progress
            server: Any = unpack(self.method.server_state, kept.server)
            model = self.method.model(server, self.run) if self.method.has_global_model else None
            whole = None if model is None else self.network.whole(model)
            card = Card.of(self.config, self.data.preprocessing, kept.round)
            self.folder.finish(whole, self.summary(), card)

    def require_an_update(self) -> None:
        """See that a run that has ended had an update.

        Raises:
            RunError: no round had one, so that the model is the untrained start.
        """
        metrics = self.folder.metrics()
        if not self.over or not all(line["skipped"] for line in metrics):
            return
        reasons = Counter(entry["reason"] for entry in _told(metrics, "refused", "lost"))
        most = "; ".join(f"{reason} ({count} times)" for reason, count in reasons.most_common(3))
        raise RunError(
            f"no round of {self.folder.path} had an update, so its model is the untrained start: "
            f"too few good reports came ({most})"
        )

    @property
    def over(self) -> bool:
        """Whether no round remains to be run."""
        return self._over(self.progress.round, self.server)

    def _over(self, number: int, server: Any) -> bool:
        """Whether round `number` was the last."""
        done = number >= self.config.rounds or bool(self._stopped)
        return done or bool(self.method.stopped(server))

    def _step(self, number: int) -> Step:
        began = time.perf_counter()
        self.states.round = number
        engine, cohort = self.engine, self._cohort_of(number)

        def heard(done: int) -> None:
            self._notify(Activity(TRAINING, number, done, len(cohort)))

        heard(0)
        result = run_round(
            self.run,
            self.method,
            self.server,
            engine,
            self.states,
            number=number,
            cohort=cohort,
            min_reports=1 if self.method.pooled else self.config.min_reports,
            aggregation=self.config.aggregation,
            noise=lambda digest: noise_stream(self.folder.noise_key(), number, digest),
            heard=heard,
        )
        packed = pack(result.server)
        # As it would be after a resume, down to the order of the names.
        self.server = unpack(self.method.server_state, packed)
        model = self.method.model(self.server, self.run)
        clients = self.progress.clients.after(result.ledger.scores)
        last = self._over(number, self.server)
        evaluated = self._evaluated(model, number) if last or self._evaluates(number) else None
        if evaluated and self.method.pooled:
            clients = evaluated.clients
        line = {**self._measured(evaluated, clients), "round": number}
        if not last and self._stands_still(line):
            last = True
            self._stopped = (
                f"no better {_words(self.headline)} in {self.config.stop_after} evaluations"
            )
            evaluated = evaluated or self._evaluated(model, number)
        copies = 0
        if last and self.method.sends_final_model and evaluated:
            clients = evaluated.clients
            copies = self.clients * len(encode(dict(model)))
        seconds = time.perf_counter() - began
        past = self.progress
        self.progress = replace(
            past,
            round=number,
            server=packed,
            clients=clients,
            stored=self.states.stored.clone(),
            bytes_down=past.bytes_down + result.bytes_down + copies,
            bytes_up=past.bytes_up + result.bytes_up,
            refused=past.refused + len(result.ledger.refused),
            seconds=past.seconds + seconds,
        )
        metrics = self._metrics(result, evaluated, model, seconds)
        metrics["bytes_down"] += copies
        if self._stopped:
            metrics["stopped"] = self._stopped
        self.folder.add_metrics(metrics)
        self._standing = self._standing.after(metrics)
        best = self._keeps_best and self._standing.best_round == number
        if best:
            self._best = self.progress
        if best or number % self.config.checkpoint_every == 0:
            self.checkpoint()
        return Step(number, self.server, metrics)

    def checkpoint(self) -> None:
        """Make the rounds so far permanent."""
        self.folder.save(
            self.progress, self.config.keep_checkpoints, self._best.round if self._best else 0
        )
        self._saved = self.progress.round
        if self.config.keep_checkpoints != "all":
            self.states.commit(self._best_stored)

    def _stands_still(self, line: Metrics) -> bool:
        """Whether the run ends with this round, since the headline figure rises no more."""
        patience = self.config.stop_after
        return patience is not None and self._standing.after(line).waited >= patience

    def _evaluates(self, number: int) -> bool:
        every = self.config.evaluate_every
        return every > 0 and number % every == 0

    def _evaluated(self, model: Tensors, number: int) -> GlobalEvaluation | None:
        """As `evaluate`; nothing where there is no global model, or nothing to evaluate it on."""
        if not (self.method.has_global_model and self.data.test_total):
            return None
        self._notify(Activity(EVALUATING, number, self.cohort, self.cohort))
        return self.evaluate(model)

    def evaluate(self, model: Tensors) -> GlobalEvaluation:
        """The global model on the union of the clients' test sets, which must not be empty."""
        rows, data = self.data.test_total, encode(dict(model))
        evaluations = (
            Evaluation(data, start, min(start + EVALUATION_ROWS, rows))
            for start in range(0, rows, EVALUATION_ROWS)
        )
        pieces = list(self.engine.evaluate(evaluations))
        terms = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return GlobalEvaluation.of(self.likelihood, terms, self.data)

    @property
    def headline(self) -> str:
        """Name of the metric that the run is for, such as `global_accuracy` or `local_rmse`."""
        return f"{self.method.headline}_{self.likelihood.metric}"

    def _measured(self, evaluated: GlobalEvaluation | None, clients: ClientScores) -> Metrics:
        """What a line of `metrics.jsonl` says of the global model and of the clients' own."""
        local = clients.means(self.likelihood)
        measured: Metrics = {} if evaluated is None else dict(evaluated.line)
        measured["local_accuracy"] = local.get("accuracy")
        measured["local_clients"] = clients.tested
        measured["metrics"] = {
            **({} if evaluated is None else {"global": evaluated.metrics}),
            **({"local": local} if local else {}),
        }
        return measured

    def local_accuracy(self) -> float | None:
        """Mean over clients of the accuracy of the model each last reported, on its own test set;
        None where there are no classes or no test samples.
        """
        return self.progress.clients.means(self.likelihood).get("accuracy")

    def _metrics(
        self, result: Round, evaluated: GlobalEvaluation | None, model: Tensors, seconds: float
    ) -> Metrics:
        parameters, ledger = self.network.parameters(model), result.ledger
        troubles = {str(client): reason for client, reason in ledger.troubles.items()}
        link = {"link_down": ledger.link_down, "link_up": ledger.link_up}
        # No client can name a metric as one of ours.
        info = {name: value for name, value in result.info.items() if name not in _OURS}
        return {
            **info,
            "round": result.number,
            **self._measured(evaluated, self.progress.clients),
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

    def _privacy(self) -> Metrics:
        """ε and δ of differential privacy, if there is noise."""
        settings = self.config.aggregation
        if not settings.noise:
            return {}
        times = np.zeros(self.clients, np.int64)
        for number in range(1, self.progress.round + 1):
            times[self._cohort_of(number)] += 1
        spent = epsilon(settings.noise, settings.delta, int(times.max()))
        return {"epsilon": spent, "delta": settings.delta}

    def _cohort_of(self, number: int) -> list[int]:
        """The clients of a round."""
        cyclic = self.config.sampling == "cyclic"
        return sample_cohort(self.config.seed, number, self.clients, self.cohort, cyclic=cyclic)

    def summary(self) -> Metrics:
        """What came of the rounds so far."""
        config, progress = self.config, self.progress
        parameters = self.network.parameters(self.method.model(self.server, self.run))
        kept = self._best or progress
        metrics = self.folder.metrics()
        lines = [line for line in metrics if "global" in line["metrics"]]
        last = lines[-1] if lines else {}
        local = progress.clients.means(self.likelihood)
        return {
            "method": config.method["name"],
            "headline": self.headline,
            "likelihood": self.likelihood.name,
            "dataset": self.data.dataset.name,
            "model": config.model.name,
            "clients": self.data.clients,
            "partition": self.scheme,
            "cohort": self.cohort,
            "rounds": progress.round,
            **({"model_round": kept.round} if self.method.has_global_model else {}),
            "seed": config.seed,
            "global_accuracy": last.get("global_accuracy"),
            "global_nll": last.get("global_nll"),
            "global_ece": last.get("global_ece"),
            "class_accuracy": last.get("class_accuracy"),
            "local_accuracy": local.get("accuracy"),
            "metrics": {
                "global": last["metrics"]["global"] if last else {},
                "local": local,
            },
            "bytes_down": progress.bytes_down,
            "bytes_up": progress.bytes_up,
            "link_down": sum(line.get("link_down", 0) for line in metrics),
            "link_up": sum(line.get("link_up", 0) for line in metrics),
            **self._best_metrics(metrics),
            "refused_reports": progress.refused,
            "lost_reports": sum(len(line.get("lost", {})) for line in metrics),
            "losses": _told(metrics, "refused", "lost"),
            "troubles": _told(metrics, "troubles"),
            "skipped_rounds": sum(line["skipped"] for line in metrics),
            **self._privacy(),
            "sparsity": sparsity(parameters),
            "model_parameters": parameter_count(parameters),
            "seconds": progress.seconds,
            "seconds_per_round": statistics.median([line["seconds"] for line in metrics] or [0.0]),
            "engine": config.engine,
            "stopped_reason": self._reason(),
            "folder": str(self.folder.path),
        }

    def _best_metrics(self, metrics: Sequence[Metrics]) -> Metrics:
        """The best round and its figures, where its checkpoint is kept."""
        if self._best is None:
            return {}
        number = self._best.round
        line = next(line for line in metrics if line["round"] == number)
        best = {f"best_{name}": line[name] for name in _BEST if name in line}
        return {"best_round": number, **best}

    def _reason(self) -> str:
        """Why there are no more rounds: the server's words, or that they are all done."""
        done = self.progress.round >= self.config.rounds
        if (done or self._stopped) and all(line["skipped"] for line in self.folder.metrics()):
            return NO_UPDATE
        words = self.method.stopped(self.server) or self._stopped
        return words or ("completed" if done else "interrupted")


def _words(figure: str) -> str:
    """A figure's name for people."""
    return figure.replace("_", " ")


def _told(metrics: Sequence[Metrics], *kinds: str) -> list[Metrics]:
    """What went wrong with whom and when."""
    return [
        {"round": line["round"], "client": int(client), "reason": reason}
        for line in metrics
        for kind in kinds
        for client, reason in line.get(kind, {}).items()
    ]
