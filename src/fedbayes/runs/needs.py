"""What settings need of a run, and what others take away: a table, and the one check of it.

`secure.enabled` hides single reports, and a rule other than the mean needs to see them. So the two
do not go together, and nobody wrote that down: a new setting is a row that says what it needs and
what it denies. What a method's reports allow is in its declaration (`Reports.refusals`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Reports
from fedbayes.core.wording import listed
from fedbayes.errors import ConfigError
from fedbayes.federation.engine_table import ENGINES
from fedbayes.federation.stages.stage import Stage, find_stages
from fedbayes.likelihoods.measures import AUTO
from fedbayes.methods import METHODS


class Need(StrEnum):
    """What a setting can need of a run, as the object of "needs"."""

    SINGLE = "single updates"
    PARTS = "the parts of every update"
    SCORES = "test metrics from clients"
    GLOBAL = "a global model"
    FORM = "its own encoding of numbers"
    HONEST = "honest clients"
    FIXED = "cohorts of a fixed size"
    TOGETHER = "a cohort whose masks cancel"
    CHANCE = "randomly sampled cohorts"
    CHOICE = "a choice of the clients of a round"
    SECRET = "secret cohorts"
    WAITING = "clients that wait for a round"
    KNOWN = "clients to know what the server adds of their updates"


@dataclass(frozen=True)
class Setting:
    """A setting, or a method, with what it needs and what it takes away from others."""

    words: str
    """As a user writes it."""
    active: bool
    needs: tuple[Need, ...] = ()
    denies: Mapping[Need, str] = field(default_factory=dict)
    """By need, what it does instead, as the predicate after "but" and its own words."""


def settings(config: Config, method: AnyMethod) -> Iterator[Setting]:
    """The rows of the table, as they are in a config."""
    yield from _of_reports(config)
    yield from _of_changes(config, method)
    yield from _of_cohorts(config, method)
    yield from _of_metrics(config, method)


def _of_reports(config: Config) -> Iterator[Setting]:
    """What is done with reports."""
    yield Setting(
        "secure.enabled",
        config.secure.enabled,
        (Need.FIXED, Need.TOGETHER),
        {
            Need.SINGLE: "hides them",
            Need.PARTS: "hides them",
            Need.SCORES: "hides them",
            Need.FORM: "adds 32-bit integers under masks",
        },
    )
    privacy, noise = config.privacy, bool(config.privacy.noise)
    yield Setting("privacy.noise", noise, (Need.CHANCE,), {Need.SINGLE: "excludes them"})
    silent = noise and privacy.metrics == "off"
    yield Setting("privacy.metrics = 'off'", silent, denies={Need.SCORES: "excludes them"})
    for name in ("quantile", "clips"):
        yield Setting(f"privacy.{name}", noise and bool(getattr(privacy, name)), (Need.PARTS,))

    rule = config.aggregation.rule
    yield Setting(f"aggregation.rule = {rule!r}", rule != "mean", (Need.SINGLE,))
    for stage in find_stages(config.stages):
        kind = type(stage)
        sees = kind.server is not Stage.server
        yield Setting(f"the stage {kind.__name__}", sees, (Need.SINGLE,))
    yield Setting("compression", config.compression.active, (Need.FORM,))


def _of_changes(config: Config, method: AnyMethod) -> Iterator[Setting]:
    """What becomes of changes that clients keep the sum of."""
    declared, rules, code = Reports.of(method), config.aggregation, config.compression
    noise, clip = bool(config.privacy.noise), rules.clip is not None
    yield Setting(method.name, declared.tracked, (Need.KNOWN,))
    unsaid = {Need.KNOWN: "changes them silently"}
    for stage in find_stages(config.stages):
        changes = type(stage).client is not Stage.client
        yield Setting(f"the stage {type(stage).__name__}", changes, denies=unsaid)
    heavier = rules.weighs and declared.weighted and not noise
    yield Setting("aggregation.clip under method.weighting = 'samples'", heavier, denies=unsaid)
    coded = clip and code.up != "none"
    yield Setting("aggregation.clip after compression.up", coded, denies=unsaid)
    masked = clip and config.secure.enabled and "weights" not in declared.parts
    yield Setting("aggregation.clip under secure.enabled", masked, denies=unsaid)
    moves = noise and config.privacy.quantile is not None
    told = {Need.KNOWN: "changes its bound in each round (privacy.clips does not)"}
    yield Setting("privacy.quantile", moves, denies=told)


def _of_cohorts(config: Config, method: AnyMethod) -> Iterator[Setting]:
    """Who is in a round, and when."""
    clock, waits = config.clock, config.asynchronous
    clocked, own = ENGINES[config.engine].clocked, ":" in config.sampling
    sampling = f"sampling = {config.sampling!r}"
    taken = {Need.FIXED: "does not have them"} if own or config.sampling == "poisson" else {}
    if own:
        taken[Need.CHANCE] = "does not sample with known probabilities"
    yield Setting(sampling, config.sampling != "uniform", (Need.CHOICE,), taken)
    yield Setting(sampling, config.sampling == "poisson", (Need.SECRET,))
    yield Setting(method.name, method.reports.pooled, (Need.FIXED,))
    yield Setting("clock.speeds", clock.ticks, denies={Need.SECRET: "reveals them by its times"})
    absent = clock.ticks and clock.availability != "always" and not waits.active
    yield Setting(
        "clock.availability", absent, denies={Need.CHOICE: "leaves it to their availability"}
    )
    apart = {
        Need.TOGETHER: "combines updates of clients that started at different times",
        Need.CHANCE: "fills buffers by the speed of clients",
    }
    if own or not clocked:
        apart[Need.CHOICE] = "takes whichever client is free"
    if not clocked:
        apart[Need.WAITING] = "keeps clients at work at any time"
    yield Setting("asynchronous.buffer", waits.active, denies=apart)


def _of_metrics(config: Config, method: AnyMethod) -> Iterator[Setting]:
    """Metrics that clients send, and malicious clients."""
    evaluating = "evaluate_at" in ENGINES[config.engine].settings
    attack = f"attack.kind = {config.attack.kind!r}"
    yield Setting(
        attack, config.attack.active, (Need.WAITING,), {Need.HONEST: "has malicious ones"}
    )
    yield Setting(
        "evaluate_at = 'clients'",
        config.evaluate_at == "clients" and evaluating,
        (Need.SCORES, Need.GLOBAL, Need.HONEST, Need.WAITING),
    )
    personal = not method.models.has_global
    yield Setting(method.name, personal, denies={Need.GLOBAL: "has none"})
    local = method.models.headline == "local"
    yield Setting(f"stop_after = {config.stop_after}", local and bool(config.stop_after), _OWN)
    yield Setting("keep_checkpoints = 'best'", local and config.keep_checkpoints == "best", _OWN)
    named = bool(config.metrics) and AUTO not in config.metrics
    yield Setting(f"metrics of {method.name}", named and personal, _OWN)


_OWN = (Need.SCORES,)
"""Metrics of clients' own models."""


def check_needs(config: Config, method: AnyMethod) -> None:
    """See that no active setting takes away what another one needs, or raise a ConfigError."""
    active = [each for each in settings(config, method) if each.active]
    for one in active:
        for need in one.needs:
            for other in active:
                if need in other.denies:
                    raise ConfigError(
                        f"{one.words} needs {need}, but {other.words} {other.denies[need]}. Use "
                        "only one of them"
                    )


def check_features(config: Config, method: AnyMethod) -> None:
    """Check that a method's reports support the features of its rounds.

    Raises:
        ConfigError: they are not; the text says why, and which methods' are, a line for each.
    """
    rule = config.aggregation.rule
    asked = {
        "secure sums": ("secure.enabled", config.secure.enabled),
        "compression": ("compression", config.compression.active),
        "robust rules": (
            "aggregation.clip" if rule == "mean" else f"aggregation.rule = {rule!r}",
            not config.aggregation.plain,
        ),
        "noise": ("privacy.noise", bool(config.privacy.noise)),
        "asynchronous rounds": ("asynchronous.buffer", config.asynchronous.active),
    }
    refusals, refused = Reports.of(method).refusals, []
    for feature, (words, active) in asked.items():
        if active and (why := refusals[feature]):
            able = [name for name, kind in METHODS.items() if not kind.reports.refusals[feature]]
            refused.append(
                f"{words} does not work with {method.name}: {why}. It works with "
                f"{listed(able)}. Leave it out, or choose another method.name"
            )
    if refused:
        raise ConfigError("\n".join(refused))
