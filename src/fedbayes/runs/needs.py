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
    """What a setting can need of a run, in words that follow "needs"."""

    SINGLE = "to see single reports"
    PARTS = "to see the parts of every change"
    SCORES = "clients to say how models do on their test samples"
    FORM = "to send numbers in a form of its own"
    HONEST = "honest clients"
    FIXED = "cohorts of a fixed size"
    TOGETHER = "a cohort whose masks cancel"
    CHANCE = "cohorts that are drawn for each round"
    CHOICE = "to choose who is in a round"
    SECRET = "it to be secret who is in a round"
    WAITING = "clients that wait for a round"
    KNOWN = "its clients, who keep what they reported, to know what the server adds"


@dataclass(frozen=True)
class Setting:
    """A setting, or a method, with what it needs and what it takes away from others."""

    words: str
    """As a user writes it."""
    active: bool
    needs: tuple[Need, ...] = ()
    denies: Mapping[Need, str] = field(default_factory=dict)
    """By need, what it does with that, in words that follow "which" and its own."""


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
            Need.SINGLE: "hides",
            Need.PARTS: "hides",
            Need.SCORES: "hides",
            Need.FORM: "rules out: under masks, numbers add as whole ones of 32 bits",
        },
    )
    privacy, noise = config.privacy, bool(config.privacy.noise)
    yield Setting("privacy.noise", noise, (Need.CHANCE,), {Need.SINGLE: "rules out"})
    silent = noise and privacy.metrics == "off"
    yield Setting("privacy.metrics = 'off'", silent, denies={Need.SCORES: "rules out"})
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
    unsaid = {Need.KNOWN: "changes without a word"}
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
    told = {Need.KNOWN: "moves from round to round; privacy.clips does not"}
    yield Setting("privacy.quantile", moves, denies=told)


def _of_cohorts(config: Config, method: AnyMethod) -> Iterator[Setting]:
    """Who is in a round, and when."""
    clock, waits = config.clock, config.asynchronous
    clocked, own = ENGINES[config.engine].clocked, ":" in config.sampling
    sampling = f"sampling = {config.sampling!r}"
    taken = {Need.FIXED: "does not have"} if own or config.sampling == "poisson" else {}
    if own:
        taken[Need.CHANCE] = "does not draw by a known chance"
    yield Setting(sampling, config.sampling != "uniform", (Need.CHOICE,), taken)
    yield Setting(sampling, config.sampling == "poisson", (Need.SECRET,))
    yield Setting(method.name, method.reports.pooled, (Need.FIXED,))
    yield Setting("clock.speeds", clock.ticks, denies={Need.SECRET: "tells by its seconds"})
    absent = clock.ticks and clock.availability != "always" and not waits.active
    yield Setting("clock.availability", absent, denies={Need.CHOICE: "leaves to who is there"})
    apart = {
        Need.TOGETHER: "does not have: its reports are of clients that started apart",
        Need.CHANCE: "does not have: who is in a buffer depends on how fast clients are",
    }
    if own or not clocked:
        apart[Need.CHOICE] = "leaves to whoever is free when another ends"
    if not clocked:
        apart[Need.WAITING] = "does not have: clients are at work at any time"
    yield Setting("asynchronous.buffer", waits.active, denies=apart)


def _of_metrics(config: Config, method: AnyMethod) -> Iterator[Setting]:
    """What clients say of models, and who lies."""
    evaluating = "evaluate_at" in ENGINES[config.engine].settings
    attack = f"attack.kind = {config.attack.kind!r}"
    yield Setting(attack, config.attack.active, (Need.WAITING,), {Need.HONEST: "rules out"})
    yield Setting(
        "evaluate_at = 'clients'",
        config.evaluate_at == "clients" and evaluating,
        (Need.SCORES, Need.HONEST, Need.WAITING),
    )
    local = method.models.headline == "local"
    yield Setting(f"stop_after = {config.stop_after}", local and bool(config.stop_after), _OWN)
    yield Setting("keep_checkpoints = 'best'", local and config.keep_checkpoints == "best", _OWN)
    named = bool(config.metrics) and AUTO not in config.metrics
    yield Setting(f"metrics of {method.name}", named and not method.models.has_global, _OWN)


_OWN = (Need.SCORES,)
"""What is said of clients' own models."""


def check_needs(config: Config, method: AnyMethod) -> None:
    """See that no active setting takes away what another one needs.

    Raises:
        ConfigError: one does.
    """
    active = [each for each in settings(config, method) if each.active]
    for one in active:
        for need in one.needs:
            for other in active:
                if need in other.denies:
                    raise ConfigError(
                        f"{one.words} needs {need}, which {other.words} {other.denies[need]}; have "
                        "one or the other"
                    )


def check_features(config: Config, method: AnyMethod) -> None:
    """See that a method's reports are such as the features of its rounds need.

    Raises:
        ConfigError: they are not; the text says why, and which methods' are.
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
    refusals = Reports.of(method).refusals
    for feature, (words, active) in asked.items():
        if active and (why := refusals[feature]):
            able = [name for name, kind in METHODS.items() if not kind.reports.refusals[feature]]
            raise ConfigError(
                f"{words} is not for {method.name}: {why}. It is for {listed(able)}; leave it "
                "out, or choose another method.name"
            )
