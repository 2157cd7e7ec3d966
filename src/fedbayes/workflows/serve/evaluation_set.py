"""The samples that models from files are tried on, and how these samples are standardized."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from torch import Tensor

from fedbayes.config.config import Config
from fedbayes.core.tensors import Samples
from fedbayes.core.wording import describe, listed, size
from fedbayes.data import Dataset, DataSettings, Preprocessing, differences, load_dataset
from fedbayes.data.differences import SCALE
from fedbayes.data.source_settings import TEXTS, WRITTEN, SourceSettings
from fedbayes.data.sources.conventions import WORDS
from fedbayes.data.sources.own import has_columns, own_files
from fedbayes.data.tables.columns import reading
from fedbayes.data.tables.fitting import fitted, raw, unlike_training
from fedbayes.errors import ColumnError, ConfigError, DataError, ModelError, UnclearError, warn
from fedbayes.likelihoods import Likelihood, Predictor
from fedbayes.models import ModelSettings, read_program
from fedbayes.runs.build import build_data, build_likelihood, stored_data
from fedbayes.storage.card import OWN, Card
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.serve.inputs_told import InputsTold
from fedbayes.workflows.serve.model_files import ModelFiles


@dataclass(frozen=True)
class EvaluationSet:
    """Samples to try models on."""

    samples: Samples
    """As the data set has them."""
    what: str
    """How many of what."""
    preprocessing: Preprocessing
    """Of models that bring none of their own; its classes are those of the labels."""
    standardized: str
    """By whose numbers that is."""
    likelihood: Likelihood
    """Of models that bring none of their own."""
    model: ModelSettings | None = None
    """The network of models that do not say theirs, where a run is known that they are of."""
    trusted: frozenset[str] = frozenset()
    """What may be imported if a model file names it, as `package.module:name`."""
    clients: tuple[str, ...] = ()
    """Names of the clients whose test rows these are, in order; none where it is not
    known."""
    sizes: tuple[int, ...] = ()
    """Rows of each of them."""
    silent: Preprocessing | None = None
    """What networks see whose files have no card; None: nobody said it."""

    def of_silent(self, name: str) -> tuple[Preprocessing, str]:
        """What a network sees whose file does not say it, and by whose numbers.

        Raises:
            ModelError: nobody said it either: numbers of the samples would be a guess.
        """
        if self.silent is None and self.preprocessing.target.kind in _OWN_UNIT:
            raise ModelError(
                f"{name} does not describe the unit of its target, unlike the first model. "
                "Evaluate it in a command of its own, or give --run RUN"
            )
        if self.silent is None:
            raise ModelError(
                f"{name} does not describe its standardization, unlike the first model. Give "
                "--mean and --std, or --run RUN for those of a run"
            )
        return self.silent, self.standardized


def find_tests(
    model: Path,
    run: Path | None,
    given: Sequence[str],
    *,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> EvaluationSet:
    """The samples to try a model on.

    Args:
        model: its file, which may say what it was trained on.
        run: a run folder whose clients' test sets are used, or that says how to standardize
            other data.
        given: settings, of which those of `[data]` name the data.
        mean: what models whose files have no card subtract from inputs, images in [0, 1]; one
            number, or one for each channel or feature. By default they take inputs as they are.
        std: what they divide by then.

    Raises:
        FedbayesError: what cannot be read, or does not fit.
    """
    if run is not None and (mean or std):
        raise ConfigError("--run already sets the standardization. Leave out --mean and --std")
    keys = {entry.partition("=")[0].strip() for entry in given}
    named = bool(keys & {"data.path", "data.name"})
    trusted = named_by(given)
    if run is not None:
        trusted |= _own_names(run)
    if run is not None and not named:
        if idle := sorted(keys - {"data.dir"} - _naming_code(given)):
            raise ConfigError(
                f"{idle[0]} has no effect on the test sets of {run}. Give other data with --set "
                "data.path=FILE or --dataset, or leave it out"
            )
        return replace(_of_run(run, given), trusted=trusted)
    card, source = _known(model, run, trusted)
    card, source, scaling = _scaling(model, card, source, (mean, std))
    given = _beside(card, source, given)
    if card is not None and not named:
        if card.data.get("name") == "own" or ":" in str(card.data.get("name")):
            raise ConfigError(
                f"{model} was trained on its user's own data. Give test data with --set "
                "data.path=FILE, or --run RUN for the test sets of a run"
            )
        given = [f"data.name={card.data.get('name')}", *given]
    if "data.path" not in keys:
        given = ["data.partition=iid", *given]
    config = Config.load(None, given)
    if config.data.path is not None:
        tests = _new_rows(config, config.data.path, card, source, scaling)
    else:
        tests = _of_set(config, card, source, scaling)
    if run is not None:
        tests = replace(tests, silent=tests.preprocessing)
    if card is None and any(scaling) and not (mean or std):
        tests = replace(tests, standardized=f"as {model} says")
    return replace(tests, trusted=trusted)


Stated = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation as a user gives them; empty: not at all."""


def _scaling(
    model: Path, card: Card | None, source: str, given: Stated
) -> tuple[Card | None, str, Stated]:
    """The card and its source, none where it has no more than a user's numbers, and these."""
    if card is not None and not card.by_hand:
        return card, source, given
    own = InputsTold.read(model) if card is None else card.preprocessing
    if own is None or not own.mean:
        return None, "", given
    if any(given):
        raise ConfigError(f"--mean and --std have no effect: {model} has its own. Leave them out")
    return None, "", (own.mean, own.std)


def stated(seen: Preprocessing, mean: Sequence[float], std: Sequence[float]) -> Preprocessing:
    """What a network sees by the numbers that a user states.

    Args:
        seen: the shape and scale of samples.
        mean: one number, or one for each channel or feature; 0 if empty.
        std: likewise; 1 if empty.

    Raises:
        ConfigError: they do not fit the shape, or a standard deviation is not above 0.
    """
    wanted, values = seen.shape[0], []
    for name, numbers in (("--mean", mean or (0.0,)), ("--std", std or (1.0,))):
        if len(numbers) not in (1, wanted):
            raise ConfigError(
                f"{name} has {len(numbers)} numbers, and samples of {size(seen.shape)} have "
                f"{wanted} {'channels' if len(seen.shape) > 1 else 'features'}: give one number, "
                "or one for each"
            )
        values.append(tuple(numbers) * (wanted // len(numbers)))
    if not all(value > 0 for value in values[1]):
        raise ConfigError("--std must be above 0")
    return replace(seen, mean=values[0], std=values[1])


def _silent(
    dataset: Dataset, seen: Preprocessing, scaling: Stated, x: npt.NDArray[Any]
) -> tuple[Preprocessing, str]:
    """What a network without a card sees: inputs unchanged, or as the user says."""
    if dataset.tokens is not None or (dataset.fixed and not any(scaling)):
        return seen, "by the processor" if dataset.tokens is None else "as token ids"
    target = seen.target
    if target.kind == "real":  # whose outputs are in its own unit
        target = replace(target, center=(0.0,) * target.columns, scale=(1.0,) * target.columns)
    if target.kind == "count":
        target = replace(target, center=())
    own = stated(replace(seen, target=target), *scaling)
    if scaling[0] or scaling[1]:
        return own, "by --mean and --std"
    _refuse_gaps(x)
    return own, _RAW + (f", divided by {seen.scale:g}" if seen.scale != 1 else "")


def _refuse_gaps(x: npt.NDArray[Any]) -> None:
    """Check that no value is missing, where the network has no rule to impute it."""
    if x.dtype.kind == "f" and bool(np.isnan(x).any()):
        raise DataError(
            "samples have missing values, and the model has no rule to impute them. "
            "Give --mean (used for missing values) and --std, or leave such rows out with --set "
            "data.missing=drop"
        )


def find_training(
    model: Path | None,
    path: Path,
    given: Sequence[str],
    scaling: Stated | None = None,
    like: EvaluationSet | None = None,
) -> EvaluationSet:
    """The samples of a client's own, as its network sees them: those to train on, where a part is
    to test on.

    Args:
        model: the client's network, or a run folder, which may say how its samples are
            standardized; None if it does not matter.
        path: its data.
        given: settings, of which those of `[data]` say how they are read.
        scaling: what a network without a card sees, as for `find_tests`; None: it does not matter,
            and samples are by their own statistics.
        like: other samples of the client, whose columns and classes these have without a card.

    Raises:
        FedbayesError: what cannot be read, or does not fit.
    """
    trusted = named_by(given)
    run = model if model is not None and model.is_dir() else None
    card, source = (None, "") if model is None else _known(model, run, trusted)
    if scaling is not None and model is not None:
        card, source, scaling = _scaling(model, card, source, scaling)
    if card is not None and any(scaling or ()):
        raise ConfigError(
            f"--mean and --std have no effect: {source} describes its standardization. Leave them "
            "out"
        )
    of_data = [entry for entry in given if not entry.strip().startswith("model.")]
    of_data = [*_beside(card, source, of_data), f"data.path={json.dumps(str(path))}"]
    config = Config.load(None, of_data)
    may_miss = card is not None or like is None or any(scaling or ())
    if card is None and like is not None:
        card, source, scaling = Card.of(config, like.preprocessing, 0), like.what, None
        keys = {entry: entry.partition("=")[0].strip() for entry in of_data}
        config = Config.load(None, [e for e in of_data if keys[e].removeprefix("data.") in READ])
    tests = _new_rows(config, path, card, source, scaling, training=True)
    if not may_miss:
        _refuse_gaps(tests.samples.x.numpy())
    return replace(tests, trusted=trusted)


def _beside(card: Card | None, source: str, given: Sequence[str]) -> list[str]:
    """The settings that say more than a card does."""
    if card is None:
        return list(given)
    # What the card says may be said again, so that it is trusted.
    rest = [entry for entry in given if not _repeats(entry, card)]
    task = sorted(entry.partition("=")[0] for entry in rest if entry.startswith("task"))
    if task:
        raise ConfigError(
            f"{task[0]} has no effect: {source} already has a target "
            f"({describe(card.preprocessing.target)}). Leave it out"
        )
    return rest


def named_by(given: Sequence[str]) -> frozenset[str]:
    """What settings name as `package.module:name`, so that a model file may too."""
    entries = (entry.partition("=") for entry in given)
    values = {value.strip().strip("\"'") for key, _, value in entries if key.strip() in OWN}
    return frozenset(value for value in values if ":" in value)


def _naming_code(given: Sequence[str]) -> set[str]:
    """Keys of the settings that name what is in a module, as in `named_by`."""
    return {entry.partition("=")[0].strip() for entry in given if named_by([entry])}


def _own_names(run: Path) -> frozenset[str]:
    """What the config of a run names likewise; whoever names the run trusts it."""
    folder = RunFolder(run)
    folder.refuse_changed_config()
    config = folder.config()
    names = (
        config.task["likelihood"],
        config.model.name,
        config.method["name"],
        config.data.name,
    )
    return frozenset(name for name in names if ":" in name)


def _repeats(entry: str, card: Card) -> bool:
    """Whether a setting is the user's own likelihood that the card has."""
    key, _, value = entry.partition("=")
    name = value.strip().strip("\"'")
    return key.strip() == OWN[0] and ":" in name and name == card.task.get("likelihood")


def _known(model: Path, run: Path | None, trusted: frozenset[str]) -> tuple[Card | None, str]:
    """The card that says how data are standardized, and where it is from."""
    if run is not None:
        folder = RunFolder(run)
        folder.refuse_changed_config()
        config = folder.config()
        preprocessing = folder.preprocessing() or stored_data(config, folder).preprocessing
        return Card.of(config, preprocessing, 0), str(run)
    card = card_of(model, ModelFiles(trusted))
    return card, str(model) if card is not None else ""


def card_of(model: Path, files: ModelFiles) -> Card | None:
    """The card of a file of weights or a program.

    Args:
        model: the file.
        files: those whose weights were read before.

    Raises:
        ModelError: it cannot be read, or its card is damaged.
    """
    if not is_program(model):
        return files[model][1]
    text = read_program(model)[1]
    return Card.load(text, str(model), files.trusted) if text else None


def is_program(path: Path) -> bool:
    """Whether a file is named as a program that can be run here.

    Raises:
        ModelError: it is named as one in ONNX, which other runtimes run.
    """
    if path.suffix.lower() == ".onnx":
        raise ModelError(
            f"{path} is an ONNX program, which evaluate cannot run. Export the model as .pt2 or "
            "as weights: fedbayes export RUN -o model.pt2"
        )
    return path.suffix.lower() == ".pt2"


def require_answers(answer: Predictor, seen: Preprocessing, name: str) -> None:
    """See that a program answers each raw sample by itself, or raise a ModelError."""
    found: object = None
    again: object = None
    reason = ""
    rng = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            found = answer(first := seen.example(TRIED, rng))
            again = answer(torch.cat([first[:1], seen.example(TRIED - 1, rng)]))
    except Exception as error:  # a program's own, of any class
        reason = f": {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    target = seen.target
    shape = (TRIED, target.predicted)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        what = f"logits of {shape[1]} classes" if target.classes else f"{shape[1]} predictions"
        raise ModelError(
            f"{name} returns no {what} for samples of shape "
            f"({', '.join(map(str, ('n', *seen.shape)))}) and type float32{reason}"
        )
    if not isinstance(again, Tensor) or not torch.allclose(
        found[0], again[0], rtol=1e-3, atol=1e-4, equal_nan=True
    ):
        raise ModelError(
            f"{name} answers a sample differently next to other samples, as batch normalization "
            "and dropout do in training. Call model.eval() before torch.export"
        )


TRIED = 3
"""Samples that a program is tried on: one or two may be the only number that it takes."""


def _of_run(run: Path, given: Sequence[str]) -> EvaluationSet:
    """The test sets of the clients of a run."""
    folder = RunFolder(run)
    folder.refuse_changed_config()
    config = folder.config()
    where = [entry for entry in given if entry.partition("=")[0].strip() == "data.dir"]
    if where:
        place = Config.stored(folder.config_file, where).data.dir
        config = config.model_copy(update={"data": config.data.model_copy(update={"dir": place})})
    data = stored_data(config, folder)
    kind = "validation" if config.data.validation else "test"
    return EvaluationSet(
        Samples(data.raw_test(0, data.test_total), data.test_union(0, data.test_total).y),
        f"{data.test_total:,} {kind} samples of the clients of {run}",
        data.preprocessing,
        trained_in(str(run)),
        build_likelihood(config, data.target, quiet=True),
        config.model,
        clients=tuple(data.names[client] for client in data.owners.tolist()),
        sizes=tuple(data.test_sizes().tolist()),
        silent=data.preprocessing,
    )


def refuse_own_order(card: Card | None, name: str) -> None:
    """See that a model sees pixels in the data's order.

    Raises:
        ModelError: it is a client's, which has an order of its own.
    """
    if card is not None and card.client and card.preprocessing.permuted:
        raise ModelError(
            f"{name} is the own network of client {card.client}, with its own pixel order. "
            f"Evaluate it on that client's samples: fedbayes calibrate RUN --client {card.client}"
        )


def _columns_of(before: Preprocessing) -> dict[str, Any]:
    """Settings that find the columns of a model's samples in a table."""
    tokens = before.tokens
    if tokens is None:
        return reading(before.table)
    return {
        "tokens": tokens.column,
        "processor": tokens.tokenizer,
        "max_tokens": tokens.length,
    }


def trained_in(source: str) -> str:
    """By whose numbers samples are standardized: those that a run folder or model file keeps."""
    return f"as in training, by {source}"


_RAW = "not standardized (the model's file does not describe it; set --mean and --std)"


def _of_set(config: Config, card: Card | None, source: str, scaling: Stated) -> EvaluationSet:
    """The test part of a data set."""
    data = build_data(config)
    name = data.dataset.name
    if data.dataset.official_train is None:
        warn(
            f"{name} has no official test part, so samples chosen with seed {config.seed} are "
            "used; the models may have been trained on them. Use --run for the test sets of a "
            "run."
        )
    x = data.raw_test(0, data.test_total)
    if card is None:
        preprocessing, whose = _silent(data.dataset, data.preprocessing, scaling, x.numpy())
    else:
        _fit(data.dataset, card.preprocessing, name)
        preprocessing, whose = card.preprocessing, trained_in(source)
    return EvaluationSet(
        Samples(x, data.test_union(0, data.test_total).y),
        f"{data.test_total:,} of {data.dataset.samples:,} samples of {name}",
        preprocessing,
        whose,
        _likelihood(config, card, preprocessing),
        silent=_beside_card(card, preprocessing, scaling),
    )


def _beside_card(
    card: Card | None, preprocessing: Preprocessing, scaling: Stated | None
) -> Preprocessing | None:
    """What models without a card see, with a first one that may have one."""
    if card is None:
        return preprocessing
    if scaling is None or not any(scaling):
        return None
    if preprocessing.target.kind in _OWN_UNIT:
        raise ConfigError(
            "--mean and --std have no effect next to a model that describes its target. Evaluate "
            "files without such a description in a command of their own"
        )
    return stated(preprocessing, *scaling)


_OWN_UNIT = ("real", "count")
"""Targets that a network without a card predicts in their own unit."""


def _new_rows(
    config: Config,
    path: Path,
    card: Card | None,
    source: str,
    scaling: Stated | None,
    *,
    training: bool = False,
) -> EvaluationSet:
    """All rows of a user's data, or of its test part; named by the card's columns if any."""
    dataset = _read_rows(config, path, card, source)
    for note in dataset.notes:
        warn(note)
    last = dataset.official_train or dataset.samples
    rows = slice(0, last) if training else slice(dataset.official_train or 0, dataset.samples)
    whose = ""
    if card is None:
        preprocessing = fitted(dataset, np.arange(last), dataset.target)
    else:
        preprocessing, whose = card.preprocessing, trained_in(source)
        _fit(dataset, preprocessing, str(path))
        if preprocessing.features and not dataset.features:
            warn(
                f"{path} has no feature names; the order of the model's features is assumed: "
                f"{listed(preprocessing.features, 3)}"
            )
        if not training and _same(path, card):
            warn(f"{path} has the training data of the model of {source}")
    for odd in unlike_training(dataset, rows, preprocessing):
        told = odd.told(str(path), numbered=dataset.official_train is None)
        warn(told)
    x, y = np.array(raw(dataset, rows, preprocessing)), np.array(dataset.y[rows])
    if card is None and scaling is not None:
        preprocessing, whose = _silent(dataset, preprocessing, scaling, x)
    part = "training" if training else "test"
    parted = dataset.official_train is not None
    kind = f"the {len(y):,} {part} rows" if parted else f"all {len(y):,} rows"
    samples = Samples(torch.from_numpy(x), torch.from_numpy(y))
    likelihood = _likelihood(config, card, preprocessing)
    silent = _beside_card(card, preprocessing, scaling)
    what = f"{kind} of {path}"
    return EvaluationSet(samples, what, preprocessing, whose, likelihood, silent=silent)


READ = {"path", "dir", "label", "group", "split", "missing", "scale", "sheet"}
READ |= {"channels", "processor", "size", "crop", *WRITTEN}
"""Settings of `[data]` that have an effect if a card describes the samples."""


def _read_rows(config: Config, path: Path, card: Card | None, source: str) -> Dataset:
    """A user's own data, as far as it is said how they are read; arguments as for `_new_rows`."""
    settings = config.data
    asked = settings.model_fields_set - {"name"}
    used = READ if card is not None else set(SourceSettings.model_fields)
    idle = sorted(asked - used)
    if idle:
        by = f", with the features and classes of {source}" if card is not None else ""
        raise ConfigError(f"data.{idle[0]} has no effect: all rows are used{by}. Leave it out")
    kinds = config.target_kinds
    read: dict[str, Any] = {name: getattr(settings, name) for name in asked}
    if card is not None:
        before = card.preprocessing
        kinds = (before.target.kind,)
        read["classes"] = before.classes
        if has_columns(path):
            label = [before.label or "label"] if before.classes else before.target.names
            written = {n: card.data[n] for n in WRITTEN if n in card.data and n != "decimal"}
            read = {"label": label, **_of_kind(path, written), **read, **_columns_of(before)}
    try:
        return _loaded(read, kinds, card)
    except ValidationError as error:
        raise ConfigError(f"data: {error.errors()[0]['msg']}") from None
    except ColumnError as error:
        if card is None or error.setting != "features":
            raise
        raise absent_feature(path, source, error) from None


def _of_kind(path: Path, written: dict[str, Any]) -> dict[str, Any]:
    """Settings of how tables are written, as far as they have an effect on files of this kind."""
    name = own_files(path)["train"][0].name.lower()
    if name.endswith(TEXTS):
        return written
    files = {"na_values"} if name.endswith(".parquet") else {"na_values", "header_rows"}
    return {key: value for key, value in written.items() if key in files}


def _loaded(read: dict[str, Any], kinds: Sequence[str], card: Card | None) -> Dataset:
    """Data by settings; where a file can be read in two ways, as those of the training were."""
    try:
        return load_dataset(DataSettings(**read), kinds)
    except UnclearError:
        decimal = card.preprocessing.decimal if card is not None else ""
        if not decimal:
            raise
    warn(
        f"{read['path']} can be read in two ways; its decimals are {WORDS[decimal]}, as in "
        "training (data.decimal)"
    )
    return load_dataset(DataSettings(**{**read, "decimal": decimal}), kinds)


def absent_feature(path: Path | str, source: str, error: ColumnError) -> DataError:
    """The error of a table that lacks a feature of a model.

    Args:
        path: the table.
        source: the model.
        error: that of who read the table.
    """
    return DataError(
        f"{path} has no column '{error.column}', which the model of {source} needs{error.like}. "
        "Missing values may be left empty"
    )


def of_card(path: Path, trusted: frozenset[str] = frozenset()) -> tuple[EvaluationSet, Card]:
    """No samples, but how a model file says that samples are read, and all else that it says.

    Args:
        path: the file.
        trusted: what may be imported if it names it.

    Raises:
        ModelError: it cannot be read, or does not say.
    """
    card, source = _known(path, None, trusted)
    if card is None:
        raise ModelError(
            f"{path} has no card, which describes the inputs and the target of a model. Predict "
            "with the run folder, or with a file of fedbayes export"
        )
    nothing = Samples(torch.empty(0, *card.preprocessing.shape), torch.empty(0))
    whose = trained_in(source)
    tests = EvaluationSet(
        nothing, "no samples", card.preprocessing, whose, card.likelihood, trusted=trusted
    )
    return tests, card


def _likelihood(config: Config, card: Card | None, preprocessing: Preprocessing) -> Likelihood:
    """That of the card, or else that of the settings for these targets."""
    if card is not None:
        return card.likelihood
    return build_likelihood(config, preprocessing.target)


def _same(path: Path, card: Card) -> bool:
    """Whether this is the very file that a model was trained on."""
    try:
        settings = DataSettings(**{**card.data, "name": "own", "path": path})
        dataset = load_dataset(settings, (card.preprocessing.target.kind,))
    except (DataError, ValidationError):
        return False
    return dataset.digest == card.preprocessing.digest


def _fit(dataset: Dataset, before: Preprocessing, name: str) -> None:
    """See that a data set is of the kind that a model was trained on."""
    for what, then, now in differences(before, dataset, may_lack_names=True):
        way = ""
        if what == SCALE and dataset.name == "own":
            way = (
                f". Set data.scale={then} if the file has the same raw numbers as the training; "
                "if its numbers are already scaled, multiply them first"
            )
        raise ModelError(f"{name} has {what} {now}; the model was trained on {then}{way}")
