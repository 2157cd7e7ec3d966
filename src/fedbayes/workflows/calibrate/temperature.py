"""The temperature of a run's model, from sums over its clients' held-out rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

from fedbayes.contracts import Sampler
from fedbayes.core.brief import Brief
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, DataError
from fedbayes.likelihoods import Classes, Likelihood
from fedbayes.likelihoods.numeric import check_share
from fedbayes.likelihoods.temperature import TemperatureSums, has_temperature, sums_of
from fedbayes.likelihoods.trust import Trust, examine
from fedbayes.runs.personal import temperature_of
from fedbayes.storage.calibrations import (
    TEMPERATURE,
    Temperature,
    own_temperature,
    read_temperature,
)
from fedbayes.workflows.calibrate.ended_run import EndedRun
from fedbayes.workflows.calibrate.held_out import check_counted, divided


@dataclass(frozen=True)
class Quality:
    """How true probabilities are, from sums over clients."""

    nll: float
    """Mean negative log-likelihood, nats."""
    ece: float
    """Expected calibration error."""
    accuracy: float
    """The share of right predictions: of classes, or of labels."""


@dataclass(frozen=True, repr=False)
class FittedTemperature(Brief):
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
    replaced: tuple[float, ...] = ()
    """Temperatures that predictions no longer have: that of the end of the run, or clients' own."""


def calibrate_temperature(
    folder: Path | str, *, personal: bool = False, share: float = 0.5
) -> FittedTemperature:
    """Fit the temperature of a run's model, and write it next to the model.

    It has the least negative log-likelihood on clients' held-out rows, under the prior of
    `TemperatureSums.with_prior`, and needs their sums alone.
    `fedbayes predict` reads it from there.

    Args:
        folder: of a run that has ended, with its data.
        personal: one for all clients' own models, each on its client's rows, instead of the global
            model.
        share: of each client's test rows that are counted; the other rows measure the result.

    Raises:
        FedbayesError: the run has not ended, has no such model, or predicts no classes; its data
            are not here; or no temperature is the best.
    """
    check_share(share, "share of the test rows")
    ended = EndedRun.open(folder, personal=personal)
    run, likelihood = ended.run, ended.run.likelihood
    if isinstance(likelihood, Classes) and not has_temperature(likelihood):
        raise ConfigError(
            f"the likelihood {likelihood.name} has no outputs for given probabilities. Define "
            "`outputs_of` in its class"
        )
    if not has_temperature(likelihood):
        raise ConfigError(
            "a temperature needs probabilities of classes or labels, and the likelihood "
            f"{likelihood.name} has none. For intervals with a coverage guarantee run fedbayes "
            "calibrate --method conformal"
        )
    ended.note_no_noise("the sums")

    def models() -> Iterator[tuple[int, Sampler, Samples, Samples]]:
        for client, draw in ended.models():
            x, y = ended.data.test(client)
            counted, rest, _ = divided(len(y), ended.config.seed, client, share)
            yield client, draw, Samples(x[counted], y[counted]), Samples(x[rest], y[rest])

    device, nothing = run.network.device, TemperatureSums.nothing()
    names = ended.folder.client_names()

    def told() -> Iterator[TemperatureSums]:
        for client, draw, rows, _ in models():
            found = sums_of(likelihood, draw, rows.to(device))
            found.check(names[client])
            yield found

    sums = reduce(add, told(), nothing)
    check_counted(sums.rows, ended.folder.path)
    try:
        found = sums.with_prior().temperature()
    except DataError as error:
        raise DataError(f"{error}. Count more rows with --share, or train longer") from None
    others = [(draw, rest.to(device)) for _, draw, _, rest in models()]
    before, after = (examine(likelihood, others, temperature=t) for t in (None, found))
    # Clients' own count where a run was not calibrated before.
    former = (
        [temperature_of(ended.folder, client) for client, _ in ended.models()]
        if personal and read_temperature(ended.folder, personal=True) is None
        else [None if personal else own_temperature(ended.folder)]
    )
    path = ended.keep(TEMPERATURE, Temperature(found, sums.rows), {})
    return FittedTemperature(
        path,
        found,
        sums.rows,
        sums.left_out,
        0 if before is None else len(before.true),
        _quality(before, likelihood),
        _quality(after, likelihood),
        sums.numbers,
        tuple(one for one in former if one is not None),
    )


def _quality(found: Trust | None, likelihood: Likelihood) -> Quality | None:
    if found is None or found.calibration is None:
        return None
    metrics = found.metrics
    return Quality(metrics["nll"], found.calibration.error, metrics[likelihood.metric])
