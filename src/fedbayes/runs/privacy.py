"""A run's privacy: where its secret is, what makes a round private, and what was spent."""

import math
from dataclasses import replace

from fedbayes.config.config import Config
from fedbayes.contracts import Federation
from fedbayes.federation.privacy import keys
from fedbayes.federation.privacy.accounting import ADD_REMOVE, REPLACE, epsilons
from fedbayes.federation.privacy.mechanism import Mechanism
from fedbayes.federation.privacy.noise import Secret
from fedbayes.federation.privacy.spending import Spending
from fedbayes.storage.metrics_file import Metrics

PUBLIC = "the seed determines the noise, so anyone who knows the seed can remove it"
"""What a run says that can be repeated."""
UNCOVERED = "rounds without noise: ε is not valid"
"""What a run says of which not every round was private."""


def needs_secret(config: Config) -> bool:
    """Whether anything in the run follows from a secret of the server's."""
    return bool(config.privacy.noise) or config.sampling == "poisson"


def identified(record: Spending, config: Config) -> Spending:
    """The record, with an id for the run's secret if it needs one and has none."""
    if record.run or not needs_secret(config) or _public(config):
        return record
    return replace(record, run=keys.new_id())


def _public(config: Config) -> bool:
    """Whether what is random follows from the seed: by wish, or since nothing is to be private."""
    return config.privacy.repeatable or not config.privacy.noise


def secret_of(record: Spending, config: Config) -> Secret | None:
    """The secret of a run; None if it needs none. A RunError if it can neither be read nor made."""
    if not needs_secret(config):
        return None
    return keys.public(config.seed) if _public(config) else keys.secret(record.run)


def mechanism(
    config: Config,
    run: Federation,
    record: Spending,
    secret: Secret | None,
    *,
    number: int,
    cohort: list[int],
) -> Mechanism | None:
    """What makes a round private; None if nothing does.

    Args:
        config: the settings.
        run: what no round changes.
        record: of the rounds before.
        secret: of the run.
        number: the round, from 1.
        cohort: who takes part.
    """
    if not config.privacy.noise or secret is None:
        return None
    drawn = config.sampling == "poisson"
    return Mechanism(
        config.privacy,
        float(config.aggregation.clip or 0),
        secret,
        record,
        number,
        run.cohort,
        rate=run.cohort / run.clients if drawn else 0.0,
        members=() if drawn else tuple(cohort),
    )


def round_summary(record: Spending) -> Metrics:
    """What the line of a round says of what it spent."""
    noise, _, rate = record.levels[-1].tolist()
    line: Metrics = {
        "noise": noise,
        "clip": {part: float(bounds[-1]) for part, bounds in record.clips.items()},
    }
    return {**line, "rate": rate} if rate else line


def run_summary(config: Config, record: Spending, rounds: int) -> Metrics:
    """What a summary says of ε after so many rounds: nothing if none of them had noise.

    `epsilon` is that of neighbours of which one has all data of one client replaced, the larger
    one; both are in `privacy`.
    """
    if not record.rounds or not rounds:
        return {}
    found = epsilons(record.spent(rounds), config.privacy.delta)
    finite = {kind: value if math.isfinite(value) else None for kind, value in found.items()}
    notes = [PUBLIC] if config.privacy.repeatable else []
    if None in finite.values():
        notes.append(UNCOVERED)
    metrics = "off" if config.secure.enabled else config.privacy.metrics
    if metrics == "on":
        notes.append("metrics, scores and numbers of samples that clients send are not covered")
    return {
        "epsilon": finite[REPLACE],
        "delta": config.privacy.delta,
        "privacy": {
            "epsilon": {REPLACE: finite[REPLACE], ADD_REMOVE: finite[ADD_REMOVE]},
            "protects": "all data of one client, against anyone who sees the global models",
            "client_metrics": metrics,
            "notes": notes,
        },
    }
