"""The temperature of a run's global model, fitted at its end from sums that its clients send."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add

from torch import Tensor

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod
from fedbayes.core.messages import SHORT_HEADER, decode, encode
from fedbayes.core.tensors import Tensors
from fedbayes.errors import DataError, EngineError, MessageError
from fedbayes.federation.client_runtime import (
    ClientFailure,
    ClientResult,
    ClientRuntime,
    Task,
    calibrating,
)
from fedbayes.federation.engines import Engine, SupportsClientEvaluation, at_work
from fedbayes.likelihoods import Likelihood
from fedbayes.likelihoods.temperature import POINTS, TemperatureSums, has_temperature
from fedbayes.runs.evaluator import Evaluator
from fedbayes.storage.scores import GlobalEvaluation

_SHARE = 0.1
"""Of a client's training samples that it holds out for the temperature."""
_LONGEST = SHORT_HEADER + 8 * 4 * POINTS
"""Bytes of a client's sums at most."""


@dataclass(frozen=True)
class CalibratedRun:
    """What the calibration of a global model came to."""

    temperature: float | None = None
    """None where there is none."""
    reason: str = ""
    """Why there is none."""
    rows: int = 0
    """That it was fitted on."""
    left_out: int = 0
    """Rows of which nothing was predicted, or that the true class was impossible for."""
    clients: int = 0
    """Whose sums it is of."""
    missed: dict[int, str] = field(default_factory=dict)
    """Clients that were asked and sent no sums, and why."""
    bytes_down: int = 0
    """Encoded bytes of the model, to the clients that were asked."""
    bytes_up: int = 0
    """Encoded bytes of their sums."""
    evaluation: GlobalEvaluation | None = None
    """Of the model at the temperature."""


def held_out_share(config: Config, method: AnyMethod, likelihood: Likelihood) -> float:
    """The share of its training samples that a client holds out for a temperature: of the global
    model, or of its own where there is no other and its private state keeps one.
    """
    if method.models.has_global or not _has_own(method):
        wanted = not no_temperature(config, method, likelihood)
    else:
        wanted = config.calibration != "none" and has_temperature(likelihood)
    return _SHARE if wanted else 0.0


def _has_own(method: AnyMethod) -> bool:
    """Whether a client's private state keeps a temperature of its own model."""
    return "temperature" in {field.name for field in fields(method.client_state)}


def no_temperature(config: Config, method: AnyMethod, likelihood: Likelihood) -> str:
    """Why a run fits no temperature of a global model; empty if it does."""
    if config.calibration == "none":
        return "calibration is 'none'"
    if not has_temperature(likelihood):
        return f"the likelihood {likelihood.name} has no temperature"
    if not method.models.has_global:
        own = "; clients with enough rows fit their own" if _has_own(method) else ""
        return f"{method.name} has no global model{own}"
    if config.privacy.noise:
        return "the clients' sums would have no noise, and ε would not cover them"
    if config.secure.enabled:
        return "the server would see the sums of single clients, which secure aggregation hides"
    return ""


class Calibrator:
    """Fits the temperature of a run's global model, and evaluates the model at it.

    Args:
        config: of the run.
        runtime: the clients that are in this process, or its own side of those that are not.
        evaluator: of the run.
    """

    def __init__(self, config: Config, runtime: ClientRuntime, evaluator: Evaluator) -> None:
        self._config, self._runtime, self._evaluator = config, runtime, evaluator
        self._reason = no_temperature(config, runtime.method, runtime.run.likelihood)
        self._found: dict[int, CalibratedRun] = {}

    @property
    def fits(self) -> bool:
        """Whether the run fits temperatures at all."""
        return not self._reason

    def of(self, number: int) -> CalibratedRun | None:
        """What was found of the model after a round; None if nobody asked."""
        return self._found.get(number)

    def fit(self, engine: Callable[[], Engine], model: Tensors, number: int) -> None:
        """Fit the temperature of the model after a round.

        Args:
            engine: gives the way to the clients, where it is needed.
            model: as the method gives it.
            number: the round.
        """
        if self._reason:
            self._found[number] = CalibratedRun(reason=self._reason)
            return
        try:
            self._found[number] = self._fitted(engine(), model, number)
        except EngineError as error:  # the run has its model all the same
            self._found[number] = CalibratedRun(reason=str(error))

    def _fitted(self, engine: Engine, model: Tensors, number: int) -> CalibratedRun:
        found = fitted(self._runtime, model, number, engine, self._config.aggregation.max_weight)
        if found.temperature is None or not self._evaluator.possible(engine):
            return found
        measures = self._evaluator.measures(True) or ()
        evaluation = self._evaluator.after_round(engine, model, number, measures, found.temperature)
        return replace(found, evaluation=evaluation) if evaluation.metrics else found


def fitted(
    runtime: ClientRuntime, model: Tensors, number: int, engine: Engine, most: float
) -> CalibratedRun:
    """The temperature of a global model by sums over its clients' held-out samples.

    Args:
        runtime: asks the clients, where they are in this process.
        model: as the method gives it.
        number: the round after which it is.
        engine: the way to clients that are elsewhere.
        most: rows of a client that are believed, as of the weight of its reports.
    """
    run, data = runtime.run, encode(dict(model))
    constants = run.network.constants_digest
    away = at_work(engine).away
    asked = [client for client in calibrating(run) if client not in away]
    tasks = (
        Task(client, number, data, None, constants, evaluate=(), calibrate=True) for client in asked
    )
    outcomes = _asked(runtime, engine, tasks)
    told: list[TemperatureSums] = []
    missed, up = dict(away), 0
    for client, outcome in zip(asked, outcomes, strict=True):
        if isinstance(outcome, ClientFailure):
            missed[client] = outcome.reason
            continue
        up += len(outcome.report)
        try:
            told.append(_read(outcome.report, most))
        except MessageError as error:
            missed[client] = str(error)
    sums = reduce(add, told, TemperatureSums.nothing())
    found = CalibratedRun(
        rows=sums.rows,
        left_out=sums.left_out,
        clients=len(told),
        missed=missed,
        bytes_down=len(asked) * len(data),
        bytes_up=up,
    )
    if not told:
        return replace(found, reason=f"no client sent sums: {next(iter(missed.values()))}")
    try:
        return replace(found, temperature=sums.with_prior().temperature())
    except DataError as error:
        return replace(found, reason=str(error))


def _asked(
    runtime: ClientRuntime, engine: Engine, tasks: Iterable[Task]
) -> Iterator[ClientResult | ClientFailure]:
    """What clients answer, in the order of the tasks."""
    if isinstance(engine, SupportsClientEvaluation):
        return engine.tried(tasks)
    return map(runtime.tried, tasks)


def _read(report: bytes, most: float) -> TemperatureSums:
    """The sums that a client sent."""
    if len(report) > _LONGEST:
        raise MessageError(f"its sums have {len(report):,} bytes; the limit is {_LONGEST:,}")
    told = {name: item for name, item in decode(report).items() if isinstance(item, Tensor)}
    sums = TemperatureSums.of(told)
    if sums.rows > most:
        raise MessageError(
            f"its sums have {sums.rows:,} rows; the limit is {most:,.0f} (aggregation.max_weight)"
        )
    return sums
