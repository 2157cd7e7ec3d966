"""From a config to the things it names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from fedbayes import likelihoods, models
from fedbayes.config.config import Config
from fedbayes.config.recommended import choose
from fedbayes.contracts import Clips, Federation
from fedbayes.core.devices import choose_device, repeatable
from fedbayes.core.portable import require_portable
from fedbayes.core.targets import Target
from fedbayes.core.wording import describe, listed
from fedbayes.data import (
    Dataset,
    FederatedData,
    Partition,
    Preprocessing,
    differences,
    load_dataset,
    partition,
)
from fedbayes.data.generated import GeneratedData
from fedbayes.data.sources.generators import Generator, GeneratorPool
from fedbayes.data.tables.summaries import (
    add_summaries,
    check_summaries,
    fit_summary,
    fit_target,
    read_summary,
)
from fedbayes.errors import ModelError, RunError, warn
from fedbayes.federation.attacks.adversary import Adversary
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.federation.stages.stage import find_stages
from fedbayes.likelihoods import Likelihood
from fedbayes.likelihoods.imbalance import require_reweightable
from fedbayes.likelihoods.measures import AUTO, fitting
from fedbayes.models import Network, read_model
from fedbayes.runs.calibration import held_out_share
from fedbayes.runs.ids import keep_ids, whole_numbers
from fedbayes.storage.card import Card
from fedbayes.storage.folder import RunFolder


def build_data(config: Config) -> FederatedData:
    """The clients' data, divided as the config says."""
    data = _built(config)
    prepare(config, data)
    return data


def prepare(config: Config, data: FederatedData, *, quiet: bool = False) -> None:
    """Settle which features are standardized: by `data.standardize`, and by what the network does
    with whole numbers.

    Args:
        config: the settings.
        data: the clients' data, which are changed.
        quiet: whether to omit the warning that whole numbers are standardized.
    """
    if config.data.standardize == "off":
        data.keep(np.ones(data.preprocessing.shape[0], bool))
        return
    if config.data.standardize == "on" or data.dataset.fixed:
        return
    whole, most = whole_numbers(data)
    if not whole.any():
        return
    if ":" in config.model.name:  # networks of our own have no embeddings
        likelihood = build_likelihood(config, data.target, quiet=True)
        if keep_ids(data, build_network(config, data.shape, likelihood), whole, most):
            return
    own = config.data.path is not None or config.data.of_factory or config.data.generator
    if own and not quiet and whole.all() and not data.preprocessing.features:
        warn(
            f"{data.dataset.name}: samples are integers that the network does not use as ids, so "
            "they are standardized; data.standardize = 'off' leaves them unchanged"
        )


def _built(config: Config) -> FederatedData:
    """The clients' data, standardized."""
    if config.data.generator is not None:
        generator, pool = _looked_at(config)
        return GeneratedData(generator, pool)
    dataset = load_dataset(config.data, config.target_kinds)
    fitted: dict[str, Any] = {}
    if files := config.data.summaries:
        names = [str(file) for file in files]
        several = [read_summary(file) for file in files]
        whole = add_summaries(several, names)
        check_summaries(several, names, config.aggregation.max_weight)
        indicate = config.data.tells_missing
        where = f"the sums of {listed(names)}"
        fitted["columns"], fitted["statistics"] = fit_summary(whole, dataset, indicate, where)
        fitted["target"] = fit_target(whole, dataset.target, where)
    return _divided(config, dataset, partition(dataset, config.data, config.seed), fitted)


def _divided(
    config: Config, dataset: Dataset, divided: Partition, fitted: Mapping[str, Any]
) -> FederatedData:
    """The clients' data; `fitted` is what is not found by their own rows."""
    return FederatedData(
        dataset,
        divided,
        config.seed,
        label=_label(config),
        label_noise=config.data.label_noise,
        label_noise_kind=config.data.label_noise_kind,
        **fitted,
    )


def stored_data(
    config: Config,
    folder: RunFolder,
    *,
    changed: Literal["warn", "refuse", "ignore", "elsewhere"] = "warn",
) -> FederatedData:
    """Return the clients' data, partitioned and standardized as the run folder has them.

    The stored partition counts: another version of a library may draw another one. Only a run that
    was killed before the partition was written draws it again.

    Args:
        config: of the run.
        folder: of the run.
        changed: what to do if the data differ from those that the run began with. `elsewhere` is
            for another machine, and raises an error for every difference.

    Raises:
        RunError: the data have changed and `changed` allows no change, or the model does not fit.
    """
    before = folder.preprocessing()
    fitted: dict[str, Any] = {}
    if before is not None:
        fitted = {"statistics": before.statistics, "target": before.target}
    if config.data.generator is not None:
        generator, pool = _looked_at(config, quiet=changed in ("ignore", "elsewhere"))
        if before is not None:
            _compare(before, pool.dataset, folder, changed)
        data: FederatedData = GeneratedData(generator, pool, **fitted)
        return _as_before(data, before)
    dataset = load_dataset(config.data, config.target_kinds)
    if before is not None:
        _compare(before, dataset, folder, changed)
        fitted["columns"] = before.columns
    divided = folder.partition() or partition(dataset, config.data, config.seed)
    return _as_before(_divided(config, dataset, divided, fitted), before)


def _as_before(data: FederatedData, before: Preprocessing | None) -> FederatedData:
    """Data whose statistics are those of before, with what else was settled then."""
    if before is not None and before.ids:
        data.keep(np.zeros(before.shape[0], bool), before.ids)
    return data


def _looked_at(config: Config, *, quiet: bool = False) -> tuple[Generator, GeneratorPool]:
    """A user's own function, and the clients of it that are looked at before the first round."""
    generator = Generator(config.data, config.seed)
    pool, notes = generator.pool(config.target_kinds)
    for note in () if quiet else notes:
        warn(note)
    return generator, pool


def _label(config: Config) -> str:
    """Name of the only column of labels; empty if they have none, or several."""
    one = config.data.name == "own" and len(config.data.label) == 1
    return config.data.label[0] if one else ""


def refuse_other_data(now: Dataset, folder: RunFolder) -> None:
    """Check that data are the data of a run to compare with, or raise a RunError that names it."""
    if (before := folder.preprocessing()) is None:
        return
    try:
        _compare(before, now, folder, "refuse")
    except RunError as error:
        raise RunError(
            f"{error} in another folder: runs to compare or average need the same data"
        ) from None


def _compare(before: Preprocessing, now: Dataset, folder: RunFolder, changed: str) -> None:
    """See whether the data are those that a run began with."""
    unlike = [
        f"{what} were {then}, and are now {here}" for what, then, here in differences(before, now)
    ]
    if changed == "elsewhere":
        if unlike or before.samples != now.samples or before.digest != now.digest:
            raise RunError(
                "these data are not the data of the run. Every node needs the same files in the "
                "same place (data.path, data.dir or FEDBAYES_DATA)"
            )
        return
    if unlike:
        raise RunError(
            f"the data have changed since {folder.path} began: {'; '.join(unlike)}. Restore them, "
            "or start a new run"
        )
    if before.samples and before.samples != now.samples:
        what = f"there were {before.samples:,} samples, and are now {now.samples:,}"
    elif before.digest and before.digest != now.digest:
        what = "some values or labels have changed"
    else:
        return
    text = f"the data have changed since {folder.path} began: {what}"
    if changed == "refuse":
        raise RunError(f"{text}. Restore them, or start a new run on them")
    if changed == "warn":
        warn(f"{text}. Its clients may have other samples than they trained on")


def build_likelihood(config: Config, target: Target, *, quiet: bool = False) -> Likelihood:
    """Return the likelihood of a config for this target; a note names one that was chosen.

    Args:
        config: with the `[task]` table.
        target: what is to be predicted.
        quiet: whether to omit the note, since another process or an earlier call has printed it.

    Raises:
        ConfigError: the likelihood does not take such a target.
    """
    settings = {key: value for key, value in config.task.items() if key != "likelihood"}
    likelihood = likelihoods.build_likelihood(config.task["likelihood"], target, **settings)
    if config.task["likelihood"] == "auto" and target.kind != "class" and not quiet:
        warn(
            f"the target is {describe(target)}; its likelihood is {likelihood.name}. Set "
            "task.likelihood for another"
        )
    return likelihood


def note_start(config: Config, preprocessing: Preprocessing) -> None:
    """Say so if the weights to start from were trained on other inputs or classes.

    Raises:
        ModelError: they are of the same classes or features in another order, and so mean others.
    """
    file = config.model.weights
    text = read_model(file)[1] if file is not None else ""
    if not text:
        return
    before = Card.load(text, str(file)).preprocessing
    named = [("classes", before.classes, preprocessing.classes)]
    tables = [tuple(column.name for column in one.table) for one in (before, preprocessing)]
    for kind, then, now in (*named, ("features", *tables)):
        if then != now and sorted(then) == sorted(now):
            raise ModelError(
                f"{file} has its {kind} in the order {listed(then)}, and these data in the order "
                f"{listed(now)}. Set data.{kind} to the order of the file"
            )
    old, new = before.target, preprocessing.target
    if (old.kind, old.names) != (new.kind, new.names):
        now = listed(new.names) if old.classes and new.classes else describe(new)
        warn(f"{file} was trained for {describe(old)}, but these data are {now}")
    if not before.same_inputs(preprocessing):
        warn(
            f"{file} was trained on {before.dataset or 'data'} with another standardization "
            f"({preprocessing.dataset}); frozen layers cannot adapt to it"
        )


def build_network(
    config: Config, shape: tuple[int, ...], likelihood: Likelihood, client: int | None = None
) -> Network:
    """The network of a config for samples of this shape and a likelihood, on its device."""
    return models.build(
        config.model,
        shape,
        likelihood.outputs,
        head=likelihood.head(),
        seed=config.seed,
        client=client,
        device=choose_device(config.device),
        precision="float32" if config.precision == "auto" else config.precision,
    )


def bind_frozen(run: RunFolder, network: Network) -> None:
    """See that a network of a run has the frozen parameters that the run was made with: its code
    may read another file now, or be of another version. Runs of before 0.3 have them in their
    saved model, from which they are taken.

    Raises:
        RunError: they are not.
    """
    if not network.constants:
        return
    if run.model_file.exists():
        network.adopt(run.model())
    progress = run.progress()
    if progress is not None and progress.constants != network.constants_digest:
        raise RunError(
            f"frozen weights of the network have changed since {run.path}. Restore its code or "
            "the pretrained files"
        )


def stored_run(folder: RunFolder, config: Config, preprocessing: Preprocessing) -> Federation:
    """What no round of a run in a folder changed, without its data.

    Args:
        folder: of the run.
        config: its settings, or those with another device.
        preprocessing: what its network sees, and what it predicts.

    Raises:
        RunError: its frozen weights are not those that the run was made with.
    """
    folder.refuse_changed_config()
    folder.check_start()
    likelihood = build_likelihood(config, preprocessing.target, quiet=True)
    network = build_network(config, preprocessing.shape, likelihood)
    bind_frozen(folder, network)
    clients = folder.generated_clients() or len(folder.client_names())
    return build_run(config, network, preprocessing, likelihood, clients)


def build_runtime(
    config: Config, data: FederatedData, *, clients: int | None = None, quiet: bool = False
) -> ClientRuntime:
    """The clients of a federation, ready to work in this process; see `build_federation`."""
    return build_federation(config, data, clients=clients, quiet=quiet)[1]


def build_federation(
    config: Config,
    data: FederatedData,
    *,
    clients: int | None = None,
    quiet: bool = False,
    choosing: bool = False,
) -> tuple[Config, ClientRuntime]:
    """The clients of a federation, ready to work in this process, and the settings that they have.

    Args:
        config: the settings.
        data: the clients' data.
        clients: how many there are in the federation; None: as many as the data are of.
        quiet: whether to omit the note on the likelihood, since another process has printed it.
        choosing: whether settings that are left at `auto` are chosen: before a first round.
    """
    if config.bits == "portable":
        require_portable()
    likelihood = build_likelihood(config, data.target, quiet=quiet)

    def network(client: int | None = None) -> Network:
        return build_network(config, data.shape, likelihood, client)

    shared, clients = network(), clients or data.clients
    run = build_run(config, shared, data.preprocessing, likelihood, clients)
    if choosing:
        config = choose(config, run, data)
        run = replace(run, training=config.training)
    method = config.build_method()
    return config, ClientRuntime(
        run,
        method=method,
        own_network=network,
        data=data,
        adversary=Adversary.of(config.attack, config.seed, clients),
        figures=not config.privacy.noise or config.privacy.metrics == "on",
        evaluate_every=config.evaluate_local_every,
        compression=config.compression,
        stages=find_stages(config.stages),
        data_cache=config.data_cache_bytes(shared.device.type),
        held_out=held_out_share(config, method, likelihood),
        validates=config.data.validation > 0,
    )


def build_run(
    config: Config,
    network: Network,
    preprocessing: Preprocessing,
    likelihood: Likelihood,
    clients: int,
) -> Federation:
    """What no round of a run changes; `preprocessing` is what the network sees of a sample, and
    `clients` are those with data.
    """
    centralized = config.build_method().reports.pooled
    if config.training.reweights:
        require_reweightable(likelihood, config.training.class_weights)
    return Federation(
        network=network,
        preprocessing=preprocessing,
        likelihood=likelihood,
        training=config.training,
        clients=1 if centralized else clients,
        cohort=1 if centralized else config.cohort_size(clients),
        rounds=config.rounds,
        seed=config.seed,
        clips=Clips(config.aggregation.clip, config.privacy.clips if config.privacy.noise else {}),
        measures=() if AUTO in config.metrics else fitting(config.metrics, likelihood),
    )


def runtime(folder: str, device: str) -> ClientRuntime:
    """What a worker process runs: the runtime of a run folder, on one of its devices."""
    run = RunFolder(Path(folder))
    config = run.config().on(device)
    repeatable(choose_device(device), config.deterministic)
    # The process that started this one has said what there is to say of the data.
    return build_runtime(config, stored_data(config, run, changed="ignore"), quiet=True)


@dataclass(frozen=True)
class RemoteClients:
    """Clients on a machine that need not see the run folder."""

    runtime: ClientRuntime
    folder: TemporaryDirectory[str]
    """Holds the weights to start from, if any, as long as there are clients."""


def elsewhere(files: Mapping[str, bytes], device: str | None) -> RemoteClients:
    """What an actor of Ray runs: the clients of a run folder that is on another machine.

    Args:
        files: of the run folder that stay as they are, by name.
        device: that the clients compute on; None: as the config says.

    Raises:
        FedbayesError: the data here are not those of the run, or something that the config names
            is not here.
    """
    folder = TemporaryDirectory(prefix="fedbayes-")
    run = RunFolder(Path(folder.name))
    for name, content in files.items():
        (run.path / name).write_bytes(content)
    config = run.config()
    if device is not None:
        config = config.on(device)
    repeatable(choose_device(config.device), config.deterministic)
    data = stored_data(config, run, changed="elsewhere")
    runtime = build_runtime(config, data, quiet=True)
    if config.model.weights is None:
        folder.cleanup()
    return RemoteClients(runtime, folder)
