"""Numbers and features of a run that do not go together: rules by feature, and the one check."""

from collections.abc import Iterator
from itertools import chain

import torch

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation, Reports, RoundContext
from fedbayes.contracts.natural import GaussianServer
from fedbayes.core.wording import listed
from fedbayes.data import FederatedData
from fedbayes.errors import ConfigError
from fedbayes.federation.attacks import ATTACKS
from fedbayes.federation.attacks.adversary import Adversary
from fedbayes.federation.attacks.base import Attack
from fedbayes.federation.attacks.shifts import holds_numbers
from fedbayes.federation.engine_table import ENGINES
from fedbayes.federation.privacy import mechanism
from fedbayes.federation.settings import FEWEST, MODULUS
from fedbayes.likelihoods.measures import AUTO

MOST_NODES = 10_000
"""Clients of a generator on an engine that has a node for each of them."""


def check_rules(
    config: Config,
    method: AnyMethod,
    run: Federation,
    data: FederatedData,
    adversary: Adversary | None,
) -> None:
    """See that a run keeps all rules, or raise a ConfigError with a line for each it breaks."""
    rules = chain(
        _of_reports(config, method, run),
        _of_secure(config, run),
        _of_compression(config, method, run),
        _of_privacy(config, method, run),
        _of_stale(config, method, run),
        _of_metrics(config, method, data),
        _of_generator(config, method, run),
        _of_attack(config, method, run, adversary) if adversary else (),
    )
    if broken := list(rules):
        raise ConfigError("\n".join(broken))


def _of_reports(config: Config, method: AnyMethod, run: Federation) -> Iterator[str]:
    """Rounds can have the reports that they need, and robust rules have enough of them."""
    needed, pooled, declared = config.min_reports, method.reports.pooled, Reports.of(method)
    if not pooled and not config.asynchronous.active and needed > run.cohort:
        yield (
            f"min_reports = {needed}, but a round of this run has {run.cohort} clients, so no "
            "round would update the model"
        )
    rule, hostile = config.aggregation.rule, config.aggregation.hostile
    if rule in ("median", "trimmed-mean") and declared.joint:
        yield (
            f"aggregation.rule = {rule!r} does not work with {method.name} and these settings: "
            f"{declared.joint}, or aggregation.rule = 'krum'"
        )
    least = {"trimmed-mean": 2 * hostile + 1, "krum": 2 * hostile + 3}.get(rule, 1)
    if needed < least:
        yield (
            f"aggregation.rule = {rule!r} with `hostile = {hostile}` needs min_reports of at "
            f"least {least}, got {needed}"
        )


def _of_secure(config: Config, run: Federation) -> Iterator[str]:
    """Numbers add under masks, and shares of keys are enough and not too many."""
    settings, cohort = config.secure, run.cohort
    if not settings.enabled:
        return
    if not ENGINES[config.engine].secure:
        able = " or ".join(
            f"`{kind.launcher}`" if kind.launcher else f"engine = {name!r}"
            for name, kind in ENGINES.items()
            if kind.secure
        )
        yield f"secure.enabled needs {able}, got engine {config.engine!r}"
    whole = sorted(n for n, t in run.network.initial.items() if not t.is_floating_point())
    if whole:
        yield (
            f"secure.enabled adds only real numbers, but {whole[0]!r} of this model has "
            f"{run.network.initial[whole[0]].dtype}. For counters of batch normalization set "
            "model.batch_norm = 'local' or 'frozen'"
        )
    if cohort < FEWEST:
        yield f"secure.enabled needs a cohort of at least {FEWEST} clients, got {cohort}"
    shares = cohort if settings.shares is None else settings.shares
    if shares > cohort or (shares < cohort and shares % 2 == 0):
        yield f"secure.shares is {shares}; give an odd number, at most the cohort of {cohort}"
    most = shares if shares == cohort else shares - 1
    if settings.threshold is not None and settings.threshold > most:
        yield (
            f"secure.threshold is {settings.threshold}; with {shares} shares and a cohort of "
            f"{cohort} it is at most {most}"
        )
    if settings.levels is not None and settings.levels * cohort >= MODULUS:
        yield (
            f"secure.levels is {settings.levels}; with a cohort of {cohort} the limit is "
            f"{(MODULUS - 1) // cohort}"
        )


def _of_compression(config: Config, method: AnyMethod, run: Federation) -> Iterator[str]:
    """What is left out or rounded is nothing that a rule or the method needs."""
    up, down, rule = config.compression.up, config.compression.down, config.aggregation.rule
    # A broadcast without a tensor that reports name too stays as it is.
    if down != "none" and all(p.origin != "server" for p in Reports.of(method).parts.values()):
        yield (
            f"compression.down does not work with {method.name}, which can compress only the "
            "updates of clients. Leave it out"
        )
    if up in ("top-k", "random-k") and rule in ("median", "trimmed-mean"):
        yield (
            f"aggregation.rule = {rule!r} needs values for each entry, but compression.up = "
            f"{up!r} sets nearly all entries to zero. Set aggregation.rule = 'krum', or "
            "compression.up = 'int8'"
        )
    narrow = sorted(n for n, t in run.network.initial.items() if t.dtype == torch.bfloat16)
    if down == "bf16" and narrow:
        yield (
            f"compression.down = 'bf16' has no effect on weights in bf16, such as {narrow[0]!r} "
            "of this model. Leave it out"
        )


def _of_privacy(config: Config, method: AnyMethod, run: Federation) -> Iterator[str]:
    """Changes have bounds, rounds are not repeated, and noise goes on what may have it."""
    settings, network = config.privacy, run.network
    if not settings.noise:
        return
    if config.aggregation.clip is None:
        yield (
            "privacy.noise needs aggregation.clip, the largest norm of a change. Set it, as in "
            "aggregation.clip = 1.0"
        )
    if config.checkpoint_every > 1:
        yield (
            "privacy.noise needs checkpoint_every = 1, because repeated rounds after an "
            "interruption would reveal more than ε"
        )
    if settings.mechanism == "matrix" and config.sampling == "poisson":
        yield (
            "privacy.mechanism = 'matrix' needs cohorts of a fixed schedule. Set sampling to "
            "'cyclic' or 'uniform', or the mechanism to 'gaussian'"
        )
    shared = sorted(network.buffers & network.initial.keys())
    if running := [n for n in shared if network.initial[n].is_floating_point()]:
        yield (
            f"privacy.noise cannot protect running statistics ({running[0]!r}): noise might make "
            "a variance negative. Use GroupNorm or LayerNorm instead of BatchNorm"
        )
    parts = mechanism.parts_of(method, run)
    if unknown := sorted(settings.clips.keys() - set(parts)):
        yield (
            f"privacy.clips lists {unknown[0]!r}, but the parts of this method's updates are "
            f"{', '.join(parts)}"
        )
    mechanism.multipliers(settings, len(parts), run.cohort)


def _of_stale(config: Config, method: AnyMethod, run: Federation) -> Iterator[str]:
    """Asynchronous rounds come to updates, and do with reports what clients count on."""
    settings, size = config.asynchronous, config.asynchronous.buffer or 1
    if not settings.active:
        return
    if Reports.of(method).stale == "whole" and settings.weight(1) != 1.0:
        yield (
            f"{method.name} cannot scale down old updates. Set asynchronous.staleness = 'constant'"
        )
    if run.clips and isinstance(method, GaussianServer) and not method.fixed_precision:
        yield (
            f"aggregation.clip does not work with {method.name} and asynchronous.buffer: client "
            "and server would clip different changes. Leave aggregation.clip out"
        )
    if ENGINES[config.engine].clocked and not config.clock.ticks:
        yield (
            "asynchronous.buffer needs a clock for the order of updates. Set clock.speeds, such "
            "as clock.speeds = 'log-normal'"
        )
    if size > run.clients:
        yield (
            f"asynchronous.buffer = {size}, but there are {run.clients} clients, and each has at "
            "most one update in a buffer"
        )
    if config.min_reports > size:
        yield (
            f"min_reports = {config.min_reports}, but a buffer has {size} updates "
            "(asynchronous.buffer), so the server would never update"
        )


def _of_metrics(config: Config, method: AnyMethod, data: FederatedData) -> Iterator[str]:
    """There are the metrics that are asked for, or that something depends on."""
    untested = not data.test_total and not config.at_clients
    if untested and config.metrics and AUTO not in config.metrics:
        yield (
            f"metrics lists {listed(config.metrics, 3)}, but no client has test samples. Set "
            "data.test, or leave metrics out"
        )
    name = "keep_checkpoints = 'best'" if config.keep_checkpoints == "best" else ""
    if config.stop_after is not None:
        name = f"stop_after = {config.stop_after}"
    if not name:
        return
    if untested:
        yield f"{name} compares metrics, but no client has test samples"
    local = method.models.headline == "local"
    which, setting = (
        ("the clients' own models", "evaluate_local_every")
        if local
        else ("the global model", "evaluate_every")
    )
    if not getattr(config, setting):
        yield (
            f"{name} compares metrics of {which}, but with {setting} = 0 only the last round is "
            f"evaluated; set {setting} to 1 or more"
        )


def _of_generator(config: Config, method: AnyMethod, run: Federation) -> Iterator[str]:
    """A method works client by client, where samples come so."""
    if config.data.generator is None:
        return
    if method.reports.pooled:
        yield (
            f"{method.name} pools the samples of all clients, but data.generator gives one client "
            "at a time. Choose another method, or data in a file"
        )
    if config.clock.by_samples:
        yield (
            "clock.by_samples needs the number of samples of each client before the first round, "
            "which data.generator does not give. Leave it out"
        )
    if ENGINES[config.engine].states != "run" and run.clients > MOST_NODES:
        yield (
            f"engine {config.engine!r} has a node for each of {run.clients:,} clients. With more "
            f"than {MOST_NODES:,} choose sequential or workers"
        )


def _of_attack(
    config: Config, method: AnyMethod, run: Federation, adversary: Adversary
) -> Iterator[str]:
    """An attack attacks something, and nobody else is drawn in."""
    attack, target = adversary.attack, run.likelihood.target
    kind = f"attack.kind {adversary.settings.kind!r}"
    if ENGINES[config.engine].states == "remote":
        local = ", ".join(name for name, one in ENGINES.items() if one.states != "remote")
        yield (
            f"[attack] works only in simulations, not with engine {config.engine!r}. Choose "
            f"{local}, or leave [attack] out"
        )
    if method.reports.pooled:
        yield f"[attack] needs clients, but {method.name} pools all data. Leave it out"
    if (start := adversary.settings.start) > run.rounds:
        yield (
            f"attack.start is {start}, but the run has {run.rounds} rounds, so no round would be "
            "attacked"
        )
    if attack.on_classes and not target.classes:
        others = ", ".join(name for name, one in ATTACKS.items() if not one.on_classes)
        yield f"{kind} needs classes, but the target is of kind {target.kind}. Choose {others}"
    if not attack.on_reports:
        return
    if config.secure.enabled:
        poisons = type(attack).poison is not Attack.poison
        instead = "Leave attack.scale at 1" if poisons else "choose label-flip or backdoor"
        yield (
            f"{kind} changes single updates, which secure.enabled hides. {instead}, or leave "
            "[secure] out"
        )
    message = method.message(method.init(run), RoundContext(run, 1))
    if not holds_numbers(method.expected(message, run)):
        yield (
            f"{kind} changes real numbers, but updates of {method.name} contain none. Choose "
            "label-flip or backdoor"
        )
