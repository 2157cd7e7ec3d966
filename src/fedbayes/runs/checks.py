"""What is seen to before the first round: that a run can be what its config says, and what a user
should know of it.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from fedbayes.config.config import SAMPLING, Config
from fedbayes.config.given import refuse_objects
from fedbayes.contracts import AnyMethod, Federation, Reports
from fedbayes.core.devices import find_devices
from fedbayes.core.fields import changed, idle, unused
from fedbayes.core.lazy import own_code, own_function
from fedbayes.core.wording import listed
from fedbayes.data import DataSettings, FederatedData, choose_scheme
from fedbayes.data.source_settings import BUILT_IN
from fedbayes.errors import ConfigError, EngineError, ModelError, require_extra
from fedbayes.federation.attacks.adversary import Adversary
from fedbayes.federation.engine_table import ENGINES, takers
from fedbayes.federation.privacy import accounting
from fedbayes.federation.stages import compression, secure, stale
from fedbayes.federation.stages.report_codec import Compressor
from fedbayes.inference.schedules import ServerSchedule
from fedbayes.inference.settings import LocalTraining
from fedbayes.likelihoods.measures import AUTO, fitting
from fedbayes.likelihoods.temperature import has_temperature
from fedbayes.models.others import TextNetwork
from fedbayes.models.settings import NAMES
from fedbayes.runs.calibration import no_temperature
from fedbayes.runs.needs import check_features, check_needs
from fedbayes.runs.networks import check_batches, remarks_on_network
from fedbayes.runs.privacy import PUBLIC, needs_secret
from fedbayes.runs.rules import check_rules


def check(
    config: Config,
    method: AnyMethod,
    run: Federation,
    data: FederatedData,
    adversary: Adversary | None = None,
) -> None:
    """Check that a config is consistent and every setting has an effect.

    Raises:
        EngineError: what the engine needs is not installed.
        ConfigError: a setting does not go with the method, the data or another setting.
        ModelError: nothing of the network is trained, or the method cannot work with it.
    """
    package, extra = ENGINES[config.engine].needs
    require_extra(extra, f"engine {config.engine!r}", EngineError, *package.split())
    if not ENGINES[config.engine].here:
        refuse_objects(config.model_dump(mode="json"), f"Engine {config.engine!r}")
    if not run.network.split()[0]:
        raise ModelError(f"model {config.model.name!r} has no trainable parameter")
    find_devices(config.devices)
    _check_tokens(config, run, data)
    _check_schedules(config, method)
    method.check(run)
    check_features(config, method)
    check_needs(config, method)
    if ":" in config.sampling:
        own_function(config.sampling, "sampling", SAMPLING)
    _check_optimizer(run)
    fitting(config.metrics, run.likelihood)
    if needs_secret(config):
        noise = config.privacy.noise
        what = "privacy.noise" if noise else "sampling = 'poisson'"
        require_extra("privacy", what, ConfigError, *accounting.PACKAGES)
    check_rules(config, method, run, data, adversary)
    check_batches(config, method, run, data)
    if adversary is not None:
        adversary.attack.check(run, data.shape)


def _check_optimizer(run: Federation) -> None:
    """See that a user's own optimizer takes a step of the network's weights."""
    name = run.training.optimizer
    if ":" not in name:
        return
    weights = run.network.split()[0]
    leaves = [run.network.initial[each].clone().requires_grad_() for each in weights]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    stepper = run.training.build_optimizer(leaves, run.training.lr)
    after = ". Its step() gets no closure"
    with own_code(ConfigError, f"the optimizer {name!r} took no step", name, after=after):
        stepper.step()


def _check_tokens(config: Config, run: Federation, data: FederatedData) -> None:
    """See that tokens of texts and networks that read them go together."""
    tokens, name = data.preprocessing.tokens, config.model.name
    reader = next((m for m in run.network.module.modules() if isinstance(m, TextNetwork)), None)
    if reader is None:
        if tokens is not None and name in NAMES:
            raise ModelError(
                f"samples are tokens of '{tokens.column}' (data.tokens), which model {name!r} "
                "cannot read. Set model.name = 'transformers'"
            )
    elif tokens is None:
        raise ModelError(
            f"{config.model.pretrained} takes texts, but samples of this data are numbers. Set "
            "data.tokens to the column of texts"
        )
    elif tokens.vocabulary > reader.vocabulary:
        raise ModelError(
            f"the tokenizer of {tokens.tokenizer} has {tokens.vocabulary:,} tokens, but "
            f"{config.model.pretrained} has {reader.vocabulary:,}. Set data.processor to the "
            "network's own"
        )


def _check_schedules(config: Config, method: AnyMethod) -> None:
    """See that a user's own schedules give a learning rate in every round."""
    training = config.training
    for number in range(1, config.rounds + 1):
        if ":" in training.schedule:
            training.learning_rate(number, config.rounds)
        if isinstance(method, ServerSchedule) and ":" in method.server_schedule:
            method.server_factor(number, config.rounds)


def _silent(config: Config) -> str:
    """Why clients tell no metrics of their own models; empty where they do."""
    if config.secure.enabled:
        return "secure.enabled is true"
    if config.privacy.noise and config.privacy.metrics == "off":
        return "privacy.metrics is off"
    return ""


def remarks(
    config: Config,
    method: AnyMethod,
    run: Federation,
    data: FederatedData,
    adversary: Adversary | None = None,
) -> list[str]:
    """What a user should know before the first round, a sentence each; as for `check`."""
    scheme = choose_scheme(data.dataset, config.data)
    known = not config.reference  # the rows of a reference table say nothing of the clients' own
    return [
        *_of_limit_test(config.data, data),
        *(_of_classes(config, data) if known else []),
        *_of_devices(config, run.network.device.type),
        *_without_effect(config, method),
        *_of_patience(config.training),
        *_of_steps(config.training, method, config.rounds),
        *_of_reports(config, method, run, data),
        *_of_cohorts(config, method, run),
        *_of_own_models(config, method),
        *_of_temperatures(config, method, run),
        *_of_attacks(config, adversary, run),
        *(_coupled(config, method, run.likelihood.name, data) if run.likelihood.coupled else []),
        *idle(config, resolved={"data.partition": scheme}),
        *idle(method, "method."),
        *remarks_on_network(config, run),
        *method.remarks(run),
        *(_falling_short(method, run, data) if known else []),
    ]


def _of_reports(
    config: Config, method: AnyMethod, run: Federation, data: FederatedData
) -> Iterator[str]:
    """What rules, masks, codes and noise come to."""
    privacy = config.privacy
    reports = config.asynchronous.buffer or run.cohort
    if config.aggregation.rule == "median" and reports < 3:
        yield (
            f"aggregation.rule = 'median' gives no protection: with {reports} updates per round "
            "it is their mean"
        )
    if ENGINES[config.engine].states != "remote":  # on other machines, they may have other data
        private = bool(privacy.noise)
        plan = secure.plan(config.secure, method, config.aggregation, run.cohort, private=private)
        yield from secure.remarks(plan, data.train_sizes())
    yield from compression.remarks(config.compression, Compressor(config.compression, method, run))
    if privacy.noise and (config.stop_after or config.keep_checkpoints == "best"):
        yield (
            "stop_after and keep_checkpoints = 'best' use test samples, which ε does not cover. "
            "Use only the server's own test samples"
        )
    if privacy.noise and privacy.repeatable:
        yield f"privacy.repeatable: {PUBLIC}"


def _of_cohorts(config: Config, method: AnyMethod, run: Federation) -> Iterator[str]:
    """What settings of cohorts and of time come to."""
    pools = f"{method.name} pools all data"
    if method.reports.pooled:
        cohorts = ("clients_per_round", "client_fraction", "sampling", "min_reports")
        yield from unused(config, cohorts, pools)
        yield from unused(config.aggregation, ("max_change", "max_weight"), pools, "aggregation.")
        if config.clock.ticks:
            yield f"clock has no effect: {pools}"
    elif config.sampling in ("cyclic", "poisson") and run.cohort == run.clients:
        yield f"sampling = {config.sampling!r} has no effect: all clients are in every round"
    yield from stale.remarks(
        config.asynchronous,
        config.clock,
        clocked=ENGINES[config.engine].clocked,
        clients=run.clients,
        cohort=run.cohort,
    )


def _of_own_models(config: Config, method: AnyMethod) -> Iterator[str]:
    """What settings of evaluations come to."""
    every = config.evaluate_local_every
    if not method.models.has_global:
        yield from unused(config, ("evaluate_every",), f"{method.name} has no global model")
    why = _silent(config)
    if method.reports.pooled:
        why = f"{method.name} has no clients' models"
    elif why:
        why = f"clients send no metrics of their own models: {why}"
    if why:
        yield from unused(config, ("evaluate_local_every",), why)
    elif every != 1 and config.stop_after:
        yield (
            "a run that stop_after ends has no evaluation of clients' own models in its last "
            f"round{'' if every else ', and so none at all'}: evaluate_local_every is {every}"
        )
    if (silent := _silent(config)) and not method.models.has_global:
        yield (
            f"the run has no metrics: {method.name} has no global model, and clients send none, "
            f"because {silent}"
        )
    elif silent and config.metrics and AUTO not in config.metrics:
        yield f"there are metrics only of the global model: {silent}"


def _of_temperatures(config: Config, method: AnyMethod, run: Federation) -> Iterator[str]:
    """Whether clients have temperatures of their own, where a method takes these."""
    why = no_temperature(config, method, run.likelihood)
    takes = "temperature" in Reports.of(method).parts and has_temperature(run.likelihood)
    if not (takes and why) or config.data.validation:
        return
    yield (
        f"no client has rows to fit a temperature, so {method.name} uses their outputs without "
        f"one: {why}"
    )


def _of_attacks(config: Config, adversary: Adversary | None, run: Federation) -> Iterator[str]:
    """What an engine rounds, and whom an attack has."""
    if not ENGINES[config.engine].exact:
        yield (
            f"engine {config.engine!r} rounds differently: other engines give slightly different "
            "numbers"
        )
    if config.attack.kind != "none" and not config.attack.clients:
        yield "attack.kind has no effect: attack.clients is 0"
    if adversary is not None:
        yield from adversary.attack.remarks(len(adversary.clients), run.cohort)


RARE = 0.1
"""Share of training rows below which a class is called rare."""


def _of_classes(config: Config, data: FederatedData) -> Iterator[str]:
    """What to say of rare classes, and of the user's own clients with one class only."""
    names = data.target.names
    if not data.target.classes or data.dataset.name in BUILT_IN or config.training.reweights:
        return
    counts = data.counts()
    share = counts.sum(0) / max(1, counts.sum())
    # A class of one row may be a typo, of which reading the table has warned.
    if len(names) * share.min() < 0.5 and share.min() < RARE and counts.sum(0).min() != 1:
        yield (
            f"{share.min():.1%} of the training rows have class {names[int(share.argmin())]!r}, "
            "so accuracy is not informative; use balanced accuracy and AUROC. See "
            "training.class_weights=balanced and predict --threshold"
        )
    owners = data.owners[(counts > 0).sum(1) == 1]
    single = [data.names[k] for k in owners.tolist()]
    if single and data.dataset.name == "own":
        yield (
            f"{len(single):,} of {len(counts):,} clients have training rows of one class only: "
            f"{listed(single, 5)}"
        )


def _of_limit_test(settings: DataSettings, data: FederatedData) -> Iterator[str]:
    """That it limits nothing, where no official test part is tested on."""
    if settings.limit_test is None:
        return
    if data.dataset.official_train is None:
        why = "there is no official test part"
    elif settings.test_counts is not None:
        why = "test_counts chooses the test samples"
    elif isinstance(settings.test, float):
        why = f"with test = {settings.test} the official test part is pooled"
    else:
        return
    yield f"data.limit_test has no effect: {why}"


def _falling_short(method: AnyMethod, run: Federation, data: FederatedData) -> list[str]:
    """How many clients have too few samples for what the method is for."""
    sizes, counts = np.unique(data.train_sizes(), return_counts=True)
    short: Counter[str] = Counter()
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        short[method.note(size, run).falls_short] += count
    del short[""]
    known = int(counts.sum())
    of = f"{known:,} clients{'' if known == run.clients else ' that were looked at'}"
    return [f"{count:,} of {of} {what}" for what, count in short.items()]


def _of_patience(training: LocalTraining) -> Iterator[str]:
    """That patience ends nothing: the first epoch is always better than none before it."""
    patience, epochs = training.patience, training.epochs
    if patience is None or patience < epochs - 1 or (training.validation and epochs > 1):
        return
    aside = ", and no client trains on the samples of training.validation"
    yield (
        f"training.patience = {patience} has no effect: it can stop after epoch {patience + 1}, "
        f"and training.epochs is {epochs}{aside if training.validation else ''}"
    )


def _of_steps(training: LocalTraining, method: AnyMethod, rounds: int) -> list[str]:
    """That a learning rate never takes a step."""
    given = [("training.", training.schedule, training.decay, training.decay_every)]
    if isinstance(method, ServerSchedule):
        own = method.server_schedule, method.server_decay, method.server_decay_every
        given.append(("method.server_", *own))
    return [
        f"{prefix}schedule = 'step' has no effect: the first step is after round {every} "
        f"({prefix}decay_every), and rounds is {rounds}"
        for prefix, schedule, decay, every in given
        if schedule == "step" and rounds <= every and decay != 1
    ]


def _of_devices(config: Config, kind: str) -> Iterator[str]:
    """What of the settings of devices does nothing, or lets numbers differ."""
    count = len(config.devices)
    if config.bits == "portable" and config.threads > 1:
        yield (
            f"threads = {config.threads} has no effect, because bits = 'portable' computes on one "
            "thread per process; engine = 'workers' uses more cores with the same bits"
        )
    if count > 1 and "devices" not in ENGINES[config.engine].settings:
        yield (
            f"devices lists {count}, but engine {config.engine!r} uses only the first, "
            f"{config.device}; {listed(takers('devices'))} uses all"
        )
    elif config.workers is not None and config.workers < count:
        yield (
            f"devices lists {count}, but {config.workers} workers use only the first "
            f"{config.workers}. Set workers to {count} or more"
        )
    if not config.deterministic and (kind == "cuda" or config.precision == "float32"):
        yield (
            "deterministic = false: numbers differ by rounding from one run to the next, and after "
            "a resume"
            if kind == "cuda"
            else "deterministic has no effect: it works only on GPUs, and this run computes on "
            f"{kind}"
        )


def _coupled(config: Config, method: AnyMethod, name: str, data: FederatedData) -> Iterator[str]:
    """Which samples a likelihood that couples them takes together in training."""
    sizes = data.train_sizes()
    most = int(sizes.sum() if method.reports.pooled else sizes.max())
    if method.reports.pooled:
        yield (
            f"{method.name} pools all data, so risk sets of {name} contain rows of several "
            "clients in training, but only its own rows in each client's metrics"
        )
    if config.training.batch_size < most:
        yield (
            f"risk sets of {name} come from a batch of {config.training.batch_size} rows. With "
            f"training.batch_size of {most:,} or more they contain all training rows of a client"
        )


def _without_effect(config: Config, method: AnyMethod) -> Iterator[str]:
    """Of settings that do nothing beside the others or under the method, a sentence each."""
    aggregation, privacy = config.aggregation, config.privacy

    if privacy.noise:
        why = "with noise every round has an update"
        yield from unused(config, ("min_reports", "stop_refused"), why)
    if config.secure.enabled and privacy.noise and privacy.metrics == "on":
        yield "privacy.metrics has no effect: with secure.enabled clients send no metrics"
    if aggregation.rule in ("trimmed-mean", "krum") and not aggregation.hostile:
        yield (
            f"aggregation.rule = {aggregation.rule!r} excludes no update: aggregation.hostile is 0"
        )
    unseen = ""
    if privacy.noise:
        unseen = "with noise, updates are not compared"
    elif config.secure.enabled:
        unseen = "with secure.enabled the server sees no single update"
    if unseen:
        yield from unused(aggregation, ("max_change",), unseen, "aggregation.")
    if aggregation.outliers == "leave-out":
        why = unseen if Reports.of(method).compared else f"{method.name} compares no networks"
        if why:
            yield f"aggregation.outliers has no effect: {why}"
    alike = "with noise" if privacy.noise else f"with {method.name} and these settings"
    if privacy.noise or not Reports.of(method).weighted:
        yield from [
            f"{table}.max_weight has no effect: {alike} all updates have weight 1"
            for table in ("aggregation", "secure")
            if changed(getattr(config, table), "max_weight")
            and (config.secure.enabled if table == "secure" else not config.at_clients)
        ]
    if config.attack.kind == "none":
        yield from unused(config.attack, ("clients", "start"), "attack.kind is none", "attack.")
