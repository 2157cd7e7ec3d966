"""The temperature of a run's model, from sums over its clients' held-out rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fedbayes.contracts import Run, Sampler
from fedbayes.errors import ConfigError
from fedbayes.likelihoods import Classes
from fedbayes.likelihoods.temperature import TemperatureSums, cooled, temperature_sums
from fedbayes.metrics import Confidences
from fedbayes.runs.temperature import StoredTemperature, write_temperature
from fedbayes.tensors import Samples
from fedbayes.tools.ended_run import EndedRun
from fedbayes.tools.held_out import check_counted, check_share, divided

_BATCH = 1000
Sent = TypeVar("Sent")


@dataclass(frozen=True)
class Quality:
    """How true probabilities are, from sums over clients."""

    nll: float
    """Mean negative log-likelihood, nats."""
    ece: float
    """Expected calibration error."""
    accuracy: float


@dataclass(frozen=True)
class Cooled:
    """What `calibrate_temperature` found and wrote."""

    path: Path
    temperature: float
    counted: int
    """Rows behind it."""
    left_out: int
    """Rows of which nothing was predicted, or that the true class was impossible for."""
    tested: int
    """Other rows, which the rest is of."""
    before: Quality | None
    """At a temperature of 1; None where no row was left."""
    after: Quality | None
    numbers: int
    """That each client sent for the temperature."""


@dataclass(frozen=True)
class _Scores:
    """What a client says of the rows that were not counted; sums add."""

    nll: float
    confidences: Confidences

    def __add__(self, other: "_Scores") -> "_Scores":
        return _Scores(self.nll + other.nll, self.confidences + other.confidences)

    def quality(self) -> Quality | None:
        rows = int(self.confidences.rows.sum())
        if not rows:
            return None
        return Quality(
            self.nll / rows,
            self.confidences.calibration().error,
            int(self.confidences.right.sum()) / rows,
        )


def calibrate_temperature(
    folder: Path | str, *, personal: bool = False, share: float = 0.5
) -> Cooled:
    """Find the temperature of the least negative log-likelihood of clients' held-out rows, from
    their sums alone, and write it beside the model, where `fedbayes predict` looks for it.

    Args:
        folder: of a run that has ended, with its data.
        personal: one for all clients' own models, each on its client's rows, in place of the global
            model.
        share: of each client's test rows that are counted; the others tell what came of it.

    Raises:
        FedbayesError: the run has not ended, has no such model, or predicts no classes; its data
            are not here; or no temperature is the best.
    """
    check_share(share)
    ended = EndedRun.open(folder, personal=personal)
    run, likelihood = ended.run, ended.run.likelihood
    if not isinstance(likelihood, Classes):
        raise ConfigError(
            f"a temperature is for probabilities of classes; the likelihood {likelihood.name} has "
            "none. fedbayes conformal makes intervals of numbers with a promise of coverage"
        )
    ended.note_no_noise("the sums")

    def models() -> Iterator[tuple[Sampler, Samples, Samples]]:
        for client, draw in ended.models():
            x, y = ended.data.test(client)
            counted, rest, _ = divided(len(y), ended.config.seed, client, share)
            yield draw, Samples(x[counted], y[counted]), Samples(x[rest], y[rest])

    sums = reduce(add, (_sums(run, likelihood, draw, rows) for draw, rows, _ in models()))
    check_counted(sums.rows, ended.folder.path)
    found = sums.temperature()
    before, after = (
        reduce(add, (_scores(run, likelihood, draw, rows, t) for draw, _, rows in models()))
        for t in (1.0, found)
    )
    path = write_temperature(
        ended.folder,
        StoredTemperature(found, personal, ended.digest, sums.rows),
    )
    tested = int(before.confidences.rows.sum())
    return Cooled(
        path,
        found,
        sums.rows,
        sums.left_out,
        tested,
        before.quality(),
        after.quality(),
        sums.numbers,
    )


def _sums(run: Run, likelihood: Classes, draw: Sampler, rows: Samples) -> TemperatureSums:
    """What a client sends first."""
    nothing = temperature_sums(
        likelihood, torch.zeros(1, 0, likelihood.outputs), torch.zeros(0, dtype=torch.int64)
    )
    parts = _parts(run, draw, rows, lambda draws, y: temperature_sums(likelihood, draws, y))
    return reduce(add, parts, nothing)


def _scores(run: Run, likelihood: Classes, draw: Sampler, rows: Samples, t: float) -> _Scores:
    """What it sends once the temperature is known."""

    def part(draws: Tensor, y: Tensor) -> _Scores:
        logs = cooled(likelihood.log_probabilities(draws.double()), t)
        told = likelihood.told(draws)
        confidence = torch.where(told, logs.amax(dim=-1).exp(), 0.0)
        nll = torch.where(told, -logs.gather(1, y[:, None])[:, 0], torch.inf)
        right = (logs.argmax(dim=-1) == y) & told
        return _Scores(float(nll.sum()), Confidences.of(confidence, right))

    nothing = Confidences.of(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    return reduce(add, _parts(run, draw, rows, part), _Scores(0.0, nothing))


def _parts(
    run: Run, draw: Sampler, rows: Samples, part: Callable[[Tensor, Tensor], Sent]
) -> Iterator[Sent]:
    """What batches of rows add."""
    device = run.network.device
    for x, y in zip(torch.split(rows.x, _BATCH), torch.split(rows.y, _BATCH), strict=True):
        if len(y):
            with torch.no_grad():
                yield part(draw(x.to(device)), y.to(device))
