"""Running: rounds until the end, with everything recorded."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Self
from weakref import WeakMethod

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation, Models
from fedbayes.contracts.returned import started
from fedbayes.core.brief import Brief
from fedbayes.core.devices import repeatable
from fedbayes.core.messages import encode
from fedbayes.core.portable import require_portable, use_threads
from fedbayes.core.tensors import Tensors, pack, unpack
from fedbayes.data import choose_scheme
from fedbayes.errors import RunError, warn
from fedbayes.federation.attacks.adversary import Adversary
from fedbayes.federation.attacks.engine import AdversarialEngine
from fedbayes.federation.client_runtime import ClientRuntime, Task
from fedbayes.federation.engine_table import start
from fedbayes.federation.engines import (
    NOT_CONNECTED,
    AtWork,
    Engine,
    Recognizes,
    SupportsFinalBroadcast,
    at_work,
)
from fedbayes.federation.ledger import Ledger, ReportWeights
from fedbayes.federation.privacy import keys
from fedbayes.federation.round import Round
from fedbayes.runs.build import (
    build_data,
    build_federation,
    note_start,
    refuse_other_data,
    stored_data,
)
from fedbayes.runs.calibration import Calibrator
from fedbayes.runs.checks import check, remarks
from fedbayes.runs.evaluator import Evaluator
from fedbayes.runs.keeper import Keeper
from fedbayes.runs.lines import evaluation_line, of_noise_alone, round_line, troubles_of
from fedbayes.runs.precision import choose
from fedbayes.runs.privacy import identified, round_summary, secret_of
from fedbayes.runs.rounds import Rounds, RoundsInVain
from fedbayes.runs.summary import summarize
from fedbayes.runs.turns import RoundPlan, Scheduler
from fedbayes.storage.activity import EVALUATING, TRAINING, Activity, Notify, unnoticed
from fedbayes.storage.best_tracker import BestTracker, divergence
from fedbayes.storage.card import Card
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.heartbeat import MOST_NAMES, Heartbeat, Work
from fedbayes.storage.metrics_file import Metrics
from fedbayes.storage.private_states import ClientStates
from fedbayes.storage.progress import Progress, first_progress, with_keys
from fedbayes.storage.scores import ClientScores, GlobalEvaluation
from fedbayes.storage.server_history import ServerHistory


@dataclass(frozen=True, repr=False)
class Step(Brief):
    """One round of a simulation.

    Examples:
        >>> import fedbayes
        >>> with fedbayes.Simulation(fedbayes.Config.create(rounds=1)) as simulation:
        ...     step = next(iter(simulation))
        >>> step.number, "global_accuracy" in step.metrics
        (1, True)
    """

    number: int
    """The round, from 1."""
    server: Any
    """The server's state after it."""
    metrics: Metrics
    """The line of `metrics.jsonl`."""


@dataclass(frozen=True)
class _Measured:
    """A round, and what is known of its model."""

    result: Round
    """With the bytes of evaluations and copies."""
    evaluated: GlobalEvaluation | None
    told: tuple[str, ...] | None
    """Metrics that it tells; see `Evaluator.measures`."""
    clients: ClientScores
    """What clients' own models are worth."""
    local: bool
    """Whether the round tells of these."""
    last: bool
    """Whether it is the last."""


class Simulation(Brief):
    """Iterate over the rounds of a run.

    Args:
        config: the settings; None to resume the run in the folder.
        folder: the run folder; a temporary one if None.
        engine: starts the engine, instead of the one that the config names (`ENGINES`).
        notify: is called with what the run is busy with: at the start, and client by client.
        beside: folders of runs that a new one is to be compared with, or averaged.
        rounds: of a run that the folder holds, how many it is to have now; None: as before.

    Raises:
        FedbayesError: something is wrong with the settings, the folder or the data; also where
            the runs to be compared with it had others.

    Examples:
        >>> import fedbayes
        >>> with fedbayes.Simulation(fedbayes.Config.create(rounds=2)) as simulation:
        ...     numbers = [step.number for step in simulation]
        >>> numbers
        [1, 2]
    """

    def __init__(
        self,
        config: Config | None = None,
        folder: Path | str | None = None,
        *,
        engine: "Callable[[Simulation], Engine] | None" = None,
        notify: Notify = unnoticed,
        beside: Sequence[Path] = (),
        rounds: int | None = None,
    ) -> None:
        self._told = notify
        self.temporary: object = None
        """Keeps a temporary folder as long as it lives; None where the folder is the user's."""
        self._engine: Engine | None = None
        self._start_engine = engine
        self._client_keys: Callable[[], Mapping[int, bytes]] = dict
        self._evaluating = 0.0  # seconds, of the global model
        self._find_folder(config, folder, rounds)
        self._build(config, beside)
        self._admit(config)
        self._threads_back = use_threads(self.config.threads)  # until the run is closed
        self._put_back = repeatable(self.network.device, self.config.deterministic)
        try:
            # Only now is the config known to be sound: a mistake leaves no folder behind.
            self._begin(config, rounds)
        except BaseException:
            self.close()
            raise

    def _find_folder(
        self, config: Config | None, folder: Path | str | None, rounds: int | None
    ) -> None:
        """The run folder, vacant or with a run that can be resumed, and the settings."""
        if folder is None:
            self.temporary = temporary = tempfile.TemporaryDirectory(prefix="fedbayes-")
            folder = temporary.name
        self.folder = RunFolder(Path(folder))
        self._heartbeat = Heartbeat(self.folder.path)
        if config is not None:
            self.folder.require_vacant()
        else:
            self.folder.require_resumable()
        self.config = config or self.folder.config()
        if self.config.bits == "portable":
            require_portable()
        if rounds is not None:
            self.config = self._longer(rounds)

    def _build(self, config: Config | None, beside: Sequence[Path]) -> None:
        """Data, network and method; settings at `auto` are chosen."""
        self._notify(Activity(f"loading {self.config.data.source}"))
        self.data = (
            build_data(config)
            if config
            else stored_data(self.config, self.folder, changed="refuse")
        )
        for other in beside if config is not None else ():
            refuse_other_data(self.data.dataset, RunFolder(other))
        self._notify(Activity("building the network"))
        self.runtime: ClientRuntime
        self.config, self.runtime = build_federation(
            self.config, self.data, choosing=config is not None
        )
        if self.config.precision == "auto":
            self._choose_precision()
        self.method: AnyMethod = self.runtime.method
        self.run: Federation = self.runtime.run
        self.likelihood = self.run.likelihood
        self.network = self.run.network
        self.clients, self.cohort = self.run.clients, self.run.cohort
        self.adversary: Adversary | None = self.runtime.adversary

    def _admit(self, config: Config | None) -> None:
        """See that the settings go together, and print what a user should know of a new run."""
        check(self.config, self.method, self.run, self.data, self.adversary)
        self._evaluator = Evaluator(self.config, self.method, self.run, self.data)
        self.calibrator = Calibrator(self.config, self.runtime, self._evaluator)
        self._versions = ServerHistory(self.folder.versions)
        self._turns = Scheduler(self.config, self.run, self.method, self.data, self._versions)
        self._keeper = Keeper(self.config, self.folder, self._versions, self._tracker())
        self._untrained = None if config is None else self._first()
        if config is not None:
            note_start(config, self.data.preprocessing)
            for remark in remarks(self.config, self.method, self.run, self.data, self.adversary):
                warn(remark)

    def _begin(self, config: Config | None, rounds: int | None) -> None:
        """Lock the folder, and take up the last complete round or start at none."""
        self.folder.lock()
        if config is not None:
            self.folder.require_vacant()  # nobody else was quicker
            self.folder.know_objects(self.config)
        if rounds is not None:
            self.folder.set_rounds(rounds)
        self._open(self._untrained)
        self._heartbeat.begin(self.config.rounds, self.work)

    def _shows(self) -> dict[str, object]:
        config = self.config
        return {
            "method": config.method["name"],
            "data": self.data.dataset.name,
            "clients": self.clients,
            "round": self.progress.round,
            "rounds": config.rounds,
            "folder": self.folder.path,
        }

    def _choose_precision(self) -> None:
        """Settle in what the run computes, for good: its stored config says it."""
        method, run = self.runtime.method, self.runtime.run
        precision, said = choose(self.config, method, run, self.data)
        self.config = self.config.model_copy(update={"precision": precision})
        if precision != "float32":
            warn(said)
            _, self.runtime = build_federation(self.config, self.data, quiet=True)

    @property
    def scheme(self) -> str:
        """How the data were divided, also where the config leaves it to the data; clients of a
        federation have data of their own.
        """
        if self.config.reference:
            return "own data"
        return choose_scheme(self.data.dataset, self.config.data)

    def _longer(self, rounds: int) -> Config:
        """The settings with more rounds than the run has had."""
        if isinstance(rounds, bool) or not isinstance(rounds, Integral):
            raise RunError(f"rounds is {rounds!r}. Give the total number of rounds of the run")
        lines = self.folder.metrics()
        done = lines[-1]["round"] if lines else 0
        if rounds <= done:
            raise RunError(
                f"{self.folder.path} has had {done} rounds, and rounds is the total. Give more "
                f"than {done}, not {rounds}"
            )
        if lines and (why := lines[-1].get("stopped")):
            raise RunError(
                f"{self.folder.path} ended by stop_after ({why}). Start a new run with a larger "
                "stop_after"
            )
        return self.config.model_copy(update={"rounds": int(rounds)})

    def _first(self) -> Progress:
        """The state before the first round."""
        server = started(self.method, self.method.init(self.run))
        return first_progress(pack(server), self.network.constants_digest)

    def _open(self, first: Progress | None) -> None:
        """Take up the last complete round, or start at none."""
        self.folder.remove_leftovers()
        checkpoint = self.folder.checkpoints.newest()
        if checkpoint is None:
            self.folder.refuse_lost_checkpoint()
        self.folder.create(
            self.config,
            self.data.division,
            self.data.preprocessing,
            (self.headline, self.likelihood.higher_is_better),
        )
        if checkpoint is None:
            checkpoint = first or self._first()
            self.folder.save(checkpoint)
        if checkpoint.constants != self.network.constants_digest:
            raise RunError(
                f"frozen weights of the network have changed since {self.folder.path} began. "
                "Restore its code and files, or start a new run"
            )
        self.folder.refuse_moved_states(len(checkpoint.states), self.config.engine)
        record = identified(checkpoint.privacy, self.config)
        timing = self._turns.take_up(checkpoint)
        self.progress: Progress = replace(checkpoint, privacy=record, timing=timing)
        self.folder.lines.drop_after(checkpoint.round)
        lines = self.folder.metrics()
        self._keeper.take_up(checkpoint.round, lines)
        self.states = ClientStates(self.folder.clients, checkpoint.states)
        self.rounds = Rounds(
            self.config,
            self.runtime,
            secret_of(record, self.config),
            unpack(self.method.server_state, checkpoint.server),
            self.states,
            self._weights_after(checkpoint),
            record,
            _held_weakly(self._step),
            checkpoint.round,
            lines[-1].get("stopped", "") if lines else "",
        )
        self.states.round = checkpoint.round
        self.states.move_older()
        self.states.check()
        self._keeper.take_states(self.states)

    def _tracker(self) -> BestTracker:
        """Which round was the best, before there was one."""
        models, likelihood = self.method.models, self.likelihood
        least = self.config.stop_min_improvement
        return BestTracker(models.headline, likelihood.metric, likelihood.higher_is_better, least)

    def _weights_after(self, checkpoint: Progress) -> ReportWeights:
        """What reports weigh, by what clients have said so far."""
        most = self.config.aggregation.max_weight
        if self.config.secure.enabled:  # all that is seen is the mean of the cohort's weights
            return ReportWeights.of(self.method, most)
        return ReportWeights.of(self.method, most, checkpoint.weights)

    @property
    def best(self) -> Progress | None:
        """The state after the best round so far, where its checkpoint is kept."""
        return self._keeper.best

    @property
    def kept(self) -> Progress:
        """The state whose model is saved: the best if it is kept, else the last."""
        return self.best or self.progress

    @property
    def engine(self) -> Engine:
        """Who runs the clients; started when first needed."""
        if self._engine is None:
            self._notify(Activity(f"starting {self.config.engine}", self.progress.round))
            start_engine = self._start_engine or partial(start, self.config.engine)
            self._engine = engine = start_engine(self)
            if isinstance(engine, Recognizes):
                engine.recognize(self.progress.client_keys)
                self._client_keys = lambda: engine.keys
            if self.adversary is not None and self.adversary.attack.on_reports:
                self._engine = AdversarialEngine(
                    self._engine,
                    self.adversary,
                    self.method,
                    self.run,
                    self._server_before,
                    self.config.compression,
                )
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._keeper.tidy()
        finally:
            self.close()

    def close(self) -> None:
        """Stop the workers and restore the settings of this process."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._keeper.close()
        self._heartbeat.close()
        self.folder.unlock()
        self._threads_back()
        self._put_back()

    def __iter__(self) -> Iterator[Step]:
        """Run the rounds that remain. After the last one the summary is written."""
        if not self.over and not self.stop:
            self.folder.reopen()
        try:
            yield from self.rounds
        except RoundsInVain as error:
            if self._keeper.saved < self.progress.round:
                self.checkpoint()
            raise RunError(
                f"{self.folder.path}: {error}. Run `resume` to try the same number of rounds "
                "again, or set stop_refused = 0 to continue without this rule"
            ) from None
        if self._keeper.saved < self.progress.round:
            self.checkpoint()
        self._keeper.tidy()
        if self.progress.round:
            if self.over:
                for state in (self.progress, self.kept):
                    self._calibrate(self._model_of(state), state.round)
            model = self._model_of(self.kept) if self.method.models.has_global else None
            if model is not None and model.keys() == self.network.initial.keys():
                model = {**self.network.fixed, **model}  # as a `state_dict` is
            card = self._card(self.kept.round)
            card = replace(card, frozen=self.network.constants_digest)
            self.folder.finish(model, self.summary(), card)
        if self.over and self.progress.privacy.run:
            keys.forget(self.progress.privacy.run)

    def _model_of(self, state: Progress) -> Tensors:
        """The global model in a state between rounds."""
        server: Any = unpack(self.method.server_state, state.server)
        return self.method.model(server, self.run)

    def _card(self, number: int) -> Card:
        """What is said of the global model after a round."""
        card = Card.of(self.config, self.data.preprocessing, number)
        found = self.calibrator.of(number)
        return card if found is None else replace(card, temperature=found.temperature)

    def _calibrate(self, model: Tensors, number: int) -> float:
        """Fit the temperature of the global model after a round, unless that was done; seconds."""
        began = time.perf_counter()
        if self.calibrator.of(number) is None:
            if self.calibrator.fits:
                self._notify(Activity("calibrating the global model", number))
            self.calibrator.fit(lambda: self.engine, model, number)
        return time.perf_counter() - began

    def require_an_update(self) -> None:
        """Check that a finished run had an update, and add notes on rounds without one or with only
        noise, and on divergence.

        Raises:
            RunError: no round had one, so that the model is the untrained start.
        """
        metrics = self.folder.metrics()
        if not self.over:
            return
        noise = sum(of_noise_alone(line) for line in metrics)
        if 2 * noise > len(metrics):
            warn(
                f"{noise} of {len(metrics)} rounds of {self.folder.path} had only noise: no "
                f"update was accepted{_reasons(metrics)}"
            )
        if diverged := divergence(metrics, noisy=self.config.privacy.noise > 0):
            warn(f"{self.folder.path}: {diverged}")
        skipped = sum(line["skipped"] for line in metrics)
        if skipped < len(metrics):
            if 2 * skipped > len(metrics):
                warn(
                    f"{skipped} of {len(metrics)} rounds of {self.folder.path} had no update; its "
                    f"model comes from the other {len(metrics) - skipped}"
                )
            return
        raise RunError(
            f"no round of {self.folder.path} had an update, so its model is untrained: too few "
            f"valid updates arrived{_reasons(metrics)}"
        )

    @property
    def server(self) -> Any:
        """The server's state."""
        return self.rounds.server

    @property
    def over(self) -> bool:
        """Whether no round remains to be run."""
        return self.rounds.over

    @property
    def stopped(self) -> str:
        """Why the headline metric ended the run before its last round; empty if it did not."""
        return self.rounds.stopped

    @property
    def stop(self) -> bool:
        """Set it to end after the round under way."""
        return self.rounds.stop

    @stop.setter
    def stop(self, stop: bool) -> None:
        self.rounds.stop = stop

    def _step(self, number: int) -> Step:
        """Run a round, evaluate the result, and put it on record."""
        engine = self.engine  # which starts now, if it has not yet
        began, evaluating = time.perf_counter(), self._seconds_evaluating
        before = self.server
        planned = self._turns.plan(
            number, self.progress.timing, before, self.cohort_of, lambda: engine
        )
        result = self._run_round(number, planned)
        planned = self._turns.ended(planned, before, result)
        return self._complete(result, planned, began, evaluating)

    def adopt(self, server: Any, states: Mapping[int, bytes], earlier: Progress) -> Step:
        """Take up a state that rounds of another run came to, as that of the first round.

        Nobody trains in this round. Its metrics are those of the model that was taken up.

        Args:
            server: the server's state.
            states: private states of clients.
            earlier: what else is known of the clients: the scores of their own models, and the
                weights that they came with.

        Raises:
            RunError: the run had rounds.
        """
        if self.progress.round:
            raise RunError(f"{self.folder.path} has had {self.progress.round} rounds")
        self.states.round = 1
        for client, state in states.items():
            self.states[client] = state
        self.progress = replace(self.progress, clients=earlier.clients, weights=earlier.weights)
        self.rounds.weights = self._weights_after(self.progress)
        ledger = Ledger(weights=self.rounds.weights)
        planned = RoundPlan([], self.progress.timing)
        step = self._complete(
            Round(1, server, [], ledger), planned, time.perf_counter(), self._seconds_evaluating
        )
        if not self._keeper.saved:
            self.checkpoint()
        return step

    def _complete(self, result: Round, planned: RoundPlan, began: float, evaluating: float) -> Step:
        """Evaluate what came of a round, and put it on record."""
        number = result.number
        packed = self.rounds.take(result)
        model = self.method.model(self.server, self.run)
        found = self._measured(model, result)
        missed: dict[int, str] = {}
        if found.last:
            began += self._calibrate(model, number)  # they are not the round's
            if self.method.models is Models.COPIED:
                found, missed = self._copied(model, found)
        evaluating = self._seconds_evaluating - evaluating
        seconds = max(0.0, time.perf_counter() - began - evaluating)
        result, past, first = found.result, self.progress, self.rounds.weights.first
        self.progress = replace(
            past,
            round=number,
            server=packed,
            clients=found.clients,
            states=self.states.known,
            bytes_down=past.bytes_down + result.bytes_down,
            bytes_up=past.bytes_up + result.bytes_up,
            refused=past.refused + len(result.ledger.refused),
            seconds=past.seconds + seconds,
            privacy=result.privacy or past.privacy,
            weights=past.weights if first is None else first,
            timing=planned.timing,
            keys=with_keys(past.keys, self._client_keys()),
        )
        evaluation = evaluation_line(
            self.likelihood,
            found.evaluated,
            found.clients if found.local or found.last else ClientScores(),
            between=self.data.clients if found.told is not None else 0,
            recent=result.ledger.scores,
        )
        metrics = round_line(result, evaluation, model, self.network, seconds) | planned.line()
        if result.privacy is not None:
            metrics["privacy"] = round_summary(result.privacy)
        if missed:
            metrics["without_copy"] = {str(client): why for client, why in missed.items()}
        if self.stopped:
            metrics["stopped"] = self.stopped
        self._record(metrics)
        return Step(number, self.server, metrics)

    def _measured(self, model: Tensors, result: Round) -> "_Measured":
        """What is known of the model of a round, where it is due; and whether it was the last."""
        number = result.number
        clients = self.progress.clients.after(result.ledger.scores)
        last = self.over
        told = self._evaluator.measures(last)
        evaluates = last or self._evaluator.due(number)
        evaluated = self._evaluated(model, number, told) if evaluates else None
        if evaluated and self.method.reports.pooled:
            clients = evaluated.clients
        local = self._evaluator.tells_local(number, result)
        own = clients if local else ClientScores()
        line = {**evaluation_line(self.likelihood, evaluated, own), "round": number}
        if not last and self._keeper.stands_still(line):
            last = True
            self.rounds.stopped = (
                f"no better {self.headline.replace('_', ' ')} in {self.config.stop_after} "
                "evaluations"
            )
            if evaluated is None or told != self._evaluator.measures(last):
                told = self._evaluator.measures(last)
                evaluated = self._evaluated(model, number, told)
        if evaluated is not None and (asked := evaluated.asked) is not None:
            result = replace(result, bytes_down=result.bytes_down + asked.bytes_down)
            result.ledger.link_down += asked.link_down
            result.ledger.link_up += asked.link_up
            if last and asked.missed:
                self._note_missed(
                    asked.missed, "did not evaluate the last model", "its metrics exclude them"
                )
        return _Measured(result, evaluated, told, clients, local, last)

    def _copied(self, model: Tensors, found: "_Measured") -> "tuple[_Measured, dict[int, str]]":
        """Every client gets the last global model; also who got none, and why."""
        evaluated, number = found.evaluated, found.result.number
        clients = evaluated.clients if evaluated and evaluated.clients.tested else found.clients
        copy = encode(dict(self.network.whole(model)))
        missed = self._delivered(copy, number)
        sent = (self.clients - len(missed)) * len(copy)
        result = replace(found.result, bytes_down=found.result.bytes_down + sent)
        return replace(found, result=result, clients=clients), missed

    def _delivered(self, copy: bytes, number: int) -> dict[int, str]:
        """Hand every client a copy of the last global model; who got none, and why."""
        if not isinstance(self.engine, SupportsFinalBroadcast):
            return {}
        card = self._card(number).dump()
        missed = self.engine.deliver(
            Task(client, number, copy, self.states.get(client), card=card)
            for client in range(self.clients)
        )
        if missed:
            way_out = f"give them {self.folder.model_file}"
            self._note_missed(missed, "did not get a copy of the last model", way_out)
        return missed

    def _note_missed(self, missed: Mapping[int, str], what: str, then: str) -> None:
        """Say how many clients the last model did not reach, and what follows."""
        first = min(missed)
        warn(
            f"{len(missed)} of {self.clients} clients {what} (client {first}: {missed[first]}); "
            f"{then}"
        )

    def _server_before(self, number: int) -> Any:
        """The server's state before a round, from which clients are at work."""
        return self.server if number > self.progress.round else self._turns.state(number)

    def _run_round(self, number: int, planned: RoundPlan) -> Round:
        """Broadcast, E-steps, reports, M-step."""
        self.states.round = number
        engine, cohort = self.engine, planned.cohort

        size = len(cohort) or self.config.asynchronous.buffer or 0

        def heard(done: int) -> None:
            self._notify(Activity(TRAINING, number, min(done, size), size))

        heard(0)
        return self.rounds.run(number, engine, cohort, past=planned.past, on_progress=heard)

    def _record(self, metrics: Metrics) -> None:
        """Write the line of the round that has just ended, and a checkpoint where one is due."""
        self.folder.lines.add(metrics)
        self._heartbeat.round_ended()
        self.rounds.count(metrics)
        self._keeper.record(self.progress, metrics)

    def checkpoint(self) -> None:
        """Make the rounds so far permanent."""
        self._keeper.checkpoint(self.progress)

    def _evaluated(
        self, model: Tensors, number: int, measures: tuple[str, ...] | None
    ) -> GlobalEvaluation | None:
        """The evaluation after a round; None where there is nothing to evaluate."""
        if not self._evaluator.possible(self.engine):
            return None
        self._notify(Activity(EVALUATING, number, self.cohort, self.cohort))
        began = time.perf_counter()
        try:
            return self._evaluator.after_round(self.engine, model, number, measures or ())
        finally:
            self._evaluating += time.perf_counter() - began

    @property
    def _seconds_evaluating(self) -> float:
        """Seconds that went into evaluations in this process so far."""
        return self._evaluating + self.runtime.evaluating["seconds"]

    def evaluate(self, model: Tensors, measures: tuple[str, ...] = ()) -> GlobalEvaluation:
        """The global model on the union of the clients' test sets, which must not be empty.

        Args:
            model: as the method gives it.
            measures: metrics besides the likelihood's own, as `likelihoods.measures.fitting` gives
                them. Those of `auto` are of each client alone where there are at most
                `runs.evaluator.MOST_UNASKED`.
        """
        return self._evaluator.evaluate(self.engine, model, measures)

    @property
    def headline(self) -> str:
        """Name of the metric that the run is for, such as `global_accuracy` or `local_rmse`."""
        return f"{self.method.models.headline}_{self.likelihood.metric}"

    def local_accuracy(self) -> float | None:
        """Mean over clients of the accuracy of the model each last reported, on its own test set;
        None without classes or test samples.
        """
        return self.progress.clients.means(self.likelihood).get("accuracy")

    def at_work(self) -> AtWork:
        """The current work of the clients; also for other threads."""
        return at_work(self._engine)

    def work(self) -> Work:
        """The same by names, as whoever may read the run folder may know it."""
        now, names = self.at_work(), self.data.names
        working, away = now.working, dict(now.away)
        if self.config.sampling == "poisson":  # who is in a round is a secret
            working, away = (), dict.fromkeys(away, NOT_CONNECTED)
        return Work(
            tuple(_name(names, client) for client in working[:MOST_NAMES]),
            len(now.working),
            {_name(names, c): away[c] for c in list(away)[:MOST_NAMES]},
            len(away),
            now.answered,
        )

    def _notify(self, activity: Activity) -> None:
        """Tell what the run is busy with."""
        self._heartbeat.notify(activity)
        self._told(activity)

    def cohort_of(self, number: int) -> list[int]:
        """The clients of a synchronous round, including absent ones."""
        return self.rounds.cohort(number)

    def summary(self) -> Metrics:
        """What came of the rounds so far."""
        return summarize(self)


def _name(names: Sequence[str], client: int) -> str:
    """The name of a client; the number of one that has none, as of centralized training."""
    return names[client] if client < len(names) else f"client {client}"


def _reasons(metrics: list[Metrics]) -> str:
    """Why reports did not count, the most frequent reasons, in brackets; empty if all did."""
    reasons = Counter(entry["reason"] for entry in troubles_of(metrics, "refused", "lost"))
    most = "; ".join(f"{reason} ({count} times)" for reason, count in reasons.most_common(3))
    return f" ({most})" if most else ""


def _held_weakly(step: Callable[[int], Step]) -> Callable[[int], Step]:
    """A method of a simulation that does not keep it alive: an unused one ends its heartbeat."""
    reference = WeakMethod(step)

    def call(number: int) -> Step:
        held = reference()
        assert held is not None
        return held(number)

    return call
