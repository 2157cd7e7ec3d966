"""What silos hand over: models in files, how many samples of each class they saw, some data."""

import io
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from filecmp import cmp
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedbayes.contracts import Federation
from fedbayes.core.files import (
    NPZ_ERRORS,
    open_npz,
    parse_json,
    read_bytes,
    read_text,
    write_beside,
)
from fedbayes.core.seals import sealed
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.core.wording import listed
from fedbayes.data import Preprocessing
from fedbayes.data.intake import arrange
from fedbayes.errors import DataError, ModelError, RunError, told_as, warn
from fedbayes.federation.engine_table import ENGINES
from fedbayes.models import CARD, DenseLayer, dense_layers, read_model
from fedbayes.models.files import kept_order
from fedbayes.runs.build import stored_run
from fedbayes.runs.personal import counts_of, own_weights, temperature_of
from fedbayes.storage.card import Card
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.private_states import folder_of_states
from fedbayes.workflows.fuse.class_order import ClassOrder, class_order, refuse_other_classes


def read_with_card(
    path: Path, trusted: Collection[str] = (), known: dict[Path, Federation] | None = None
) -> tuple[Tensors, Card | None]:
    """Return the weights in a model file, and their card.

    A client's state in the folder of a run has no card of its own: its run has the same facts.

    Args:
        path: of the file.
        trusted: as for `ModelFiles`.
        known: runs by folder, which takes up that of the file: clients share its frozen weights.

    Raises:
        ModelError: it holds no weights; or its card is damaged.
        RunError: its run is damaged, or has other frozen weights than it had.
    """
    states = folder_of_states(path.absolute())
    run = RunFolder(states.parent)
    if states == run.clients and path.is_file() and run.config_file.exists():
        preprocessing = run.preprocessing()
        if preprocessing is not None:
            return _own_network(path, run, preprocessing, {} if known is None else known)
    beside = RunFolder(path.absolute().parent)
    if path.absolute() == beside.model_file and beside.summary_file.is_file():
        with suppress(OSError):  # which is told below
            beside.sums.check(beside.model_file, read_bytes(path))
    weights, text = read_model(path)
    return weights, Card.load(text, str(path), trusted) if text else None


def _own_network(
    path: Path, run: RunFolder, preprocessing: Preprocessing, known: dict[Path, Federation]
) -> tuple[Tensors, Card]:
    """The network in the state of a client of a run, frozen parameters among its weights."""
    config = run.config().on("cpu").model_copy(update={"precision": "float32"})
    method = config.build_method()
    if method.models.headline == "global":
        raise ModelError(
            f"{path} is the private state of a client, not a network: with {method.name} clients "
            "keep no own weights"
        )
    if (place := ENGINES[config.engine].states) == "remote":
        raise ModelError(
            f"{path} is a ticket, not a network: private states of {run.path} are at their nodes"
        )
    if place != "run":
        raise ModelError(
            f"{path} is not a network: private states of {run.path} are at their nodes. Export a "
            f"client's network with fedbayes export {run.path} --client NAME"
        )
    client, _, number = path.stem.partition("-")
    names = run.client_names()
    if not (client.isdecimal() and number.isdecimal() and int(client) < len(names)):
        raise ModelError(f"{path} is not the name of a client state of {run.path}")
    if run.path not in known:
        known[run.path] = stored_run(run, config, preprocessing)
    kept = known[run.path]
    with told_as(ModelError, f"{path} is the private state of a client", RunError):
        weights = own_weights(run, method, kept, int(client), int(number))
    network = kept.network
    whole = network.whole(weights)
    order = {name: place for place, name in enumerate(network.module.state_dict())}
    card = Card.of(config, preprocessing, int(number), names[int(client)])
    return (
        {name: whole[name] for name in sorted(whole, key=lambda name: order.get(name, len(order)))},
        replace(
            card,
            temperature=temperature_of(run, int(client), int(number)),
            counts=counts_of(run, int(client), int(number)),
        ),
    )


class ModelFiles:
    """Files of weights, each read once, when somebody asks for it first.

    Args:
        trusted: what may be imported if a file names it, as `package.module:name`.
    """

    def __init__(self, trusted: Collection[str] = ()) -> None:
        self._found: dict[Path, tuple[Tensors, Card | None]] = {}
        self._runs: dict[Path, Federation] = {}
        self.trusted = trusted
        self.orders: dict[Path, ClassOrder] = {}
        """Of those whose classes `card` brought into another order."""

    def __getitem__(self, path: Path) -> tuple[Tensors, Card | None]:
        """As `read_with_card`."""
        if path not in self._found:
            self._found[path] = read_with_card(path, self.trusted, self._runs)
        return self._found[path]

    def card(self, paths: Sequence[Path]) -> Card | None:
        """As `shared_card`, of these files, whose classes all come into the order of the first.

        Raises:
            ModelError: they are of other classes or targets, or cannot be reordered.
        """
        cards = {path: card for path in paths if (card := self[path][1]) is not None}
        for path, card in cards.items():
            first, base = next(iter(cards.items()))
            refuse_other_classes(card, base, str(path), str(first))
            target, names = card.preprocessing.target, base.preprocessing.target.names
            if target.names == names:
                continue
            weights, _ = self[path]
            order = class_order(weights, card, names, str(path))
            warn(
                f"{path} has its classes in another order than {first}, whose order is used: "
                f"{listed(names)}. Give counts of samples in this order too"
            )
            seen = replace(card.preprocessing, target=replace(target, names=names))
            counts = order.counts(card.counts)
            moved = replace(card, preprocessing=seen, counts=counts)
            self._found[path] = order.weights(weights), moved
            self.orders[path] = order
        return shared_card({path: self[path][1] for path in paths})


_ALONE = "To fuse it, save only its weights, without a card: torch.save(weights, 'FILE.pt')"


def read_models(
    paths: Sequence[Path], files: ModelFiles | None = None
) -> dict[str, list[DenseLayer]]:
    """Fully connected networks from files, by path.

    Args:
        paths: the files.
        files: those that were read before.

    Raises:
        ModelError: a file is no such network, or is named twice.
    """
    models, files = {}, files or ModelFiles()
    each_once(paths)
    for path in paths:
        weights, card = files[path]
        if card is not None:
            card.require_trusted("task.likelihood", way=_ALONE)
        if card is not None and card.likelihood.head() is not None:
            raise ModelError(
                f"{path} has learned noise, which neuron matching cannot fuse. Set task.noise to "
                "a number, or to each, when you train models to fuse"
            )
        models[str(path)] = dense_layers(weights, str(path))
    return models


WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
"""Suffixes of files that weights are written to."""


def each_once(models: Sequence[Path], least: int = 1) -> None:
    """See that there are enough models, each once, or raise a ModelError; warn of copies."""
    if len(models) < least:
        inside = sorted(models[0].glob("clients/*.safetensors")) if models else []
        hint = f". Those of the run's clients are {models[0]}/clients/*.safetensors"
        raise ModelError(
            f"fusing needs at least {least} models, got {len(models)}{hint if inside else ''}"
        )
    places = [path.resolve() for path in models]
    for number, path in enumerate(models):
        if places[number] in places[:number]:
            raise ModelError(f"{path} is given twice. Give each model once")
    begun = dict[bytes, tuple[Path, Path]]()  # files that begin alike are compared whole
    for path in models:
        content = next(iter(sorted(path.glob("adapter_model.*"))), path)
        if not content.is_file():
            continue
        with content.open("rb") as file:
            first, other = begun.setdefault(file.read(_BEGIN), (path, content))
        if first != path and cmp(other, content, shallow=False):
            warn(f"{path} is a copy of {first}, so its client counts twice. Leave one out")


_BEGIN = 2**16
"""Bytes by which copies of a file are looked for."""


def shared_card(found: Mapping[Path, Card | None]) -> Card | None:
    """Return the card of the first model, if all have one.

    Args:
        found: the cards of models, by their files.

    Raises:
        ModelError: two models see other inputs of the same sample, so they cannot be fused.
    """
    cards = {path: card for path, card in found.items() if card is not None}
    for path, card in cards.items():
        first, base = next(iter(cards.items()))
        one, other = card.preprocessing, base.preprocessing
        if one.permuted and card.client != base.client:
            raise ModelError(
                f"{path} and {first} are own networks of clients with different pixel orders, but "
                "fused models need the same inputs"
            )
        if one.target != other.target or not one.same_inputs(other):
            what, way = "standardizations", "data.summaries gives runs the same one"
            if one.features != other.features:
                what = "features, or another order of them"
                way = (
                    "data.features sets columns and their order, data.summaries categories and "
                    "which columns have missing values"
                )
            raise ModelError(
                f"{path} and {first} have different {what}, but fused models need the same inputs. "
                f"Train them again ({way})"
            )
    return next(iter(cards.values())) if len(cards) == len(found) else None


def write_model(path: Path, weights: Tensors, card: Card | None = None) -> None:
    """Write a `state_dict`, whole or not at all: `.safetensors`, or any other by PyTorch.

    Args:
        path: the file.
        weights: by name.
        card: of the model, for the file's metadata.
    """
    text = "" if card is None else card.dump()
    if path.suffix.lower() == ".safetensors":
        named = {CARD: text} if text else {}
        write_beside(path, sealed(dict(weights), kept_order(weights) | named))
        return
    state = OrderedDict(weights)
    if text:
        setattr(state, CARD, text)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_beside(path, buffer.getvalue())


def read_counts(path: Path, models: Sequence[Path]) -> npt.NDArray[np.int64]:
    """Training samples of each model and class [S, K], from JSON.

    The file is a list with a list of counts for each model in order, or an object that maps file
    names (with or without folder and suffix) to such lists.

    Raises:
        DataError: the file is absent, no JSON, or does not fit the models.
    """
    with told_as(DataError, f"cannot read the counts {path}", OSError, ValueError):
        content = parse_json(read_text(path))
    if isinstance(content, dict):
        content = [_row(content, model, path) for model in models]
    form = "a list of counts for each model, all of one length, such as [[50, 3], [0, 41]]"
    if not isinstance(content, list) or not all(
        isinstance(row, list) and all(type(n) is int for n in row) for row in content
    ):
        raise DataError(f"{path} must contain {form}")
    if len(content) != len(models) or len({len(row) for row in content}) != 1:
        raise DataError(f"{path} must contain {form}; there are {len(models)} models")
    counts = np.array(content, dtype=np.int64)
    if (counts < 0).any() or not counts.sum(1).all():
        raise DataError(f"{path}: counts must be at least 0, with at least one sample per model")
    return counts


def read_samples(
    path: Path,
    preprocessing: Preprocessing | None = None,
    target: Target | None = None,
    *,
    unit: bool = False,
) -> Samples:
    """Inputs `x` [n, ...] and targets `y` [n] from an NPZ file, as the networks see them.

    Args:
        path: the file.
        preprocessing: what the networks see of the samples in the file, which are raw; None if
            the file has them as the networks see them.
        target: what `y` is: class indices by default; numbers [n] or [n, columns] otherwise.
        unit: whether raw pictures are in [0, 1], so that those of 8 bits are divided by 255.

    Raises:
        DataError: the file is absent, no NPZ, not of this form, or its samples are of another shape
            than those that the networks were trained on.
    """
    if path.suffix.lower() in (".csv", ".tsv", ".parquet", ".xlsx"):
        raise DataError(
            f"{path} is a table, and samples here are an .npz file with arrays x and y. Score a "
            f"model on a table with fedbayes evaluate MODEL --set data.path={path}"
        )
    with (
        told_as(DataError, f"cannot read the samples {path}", *NPZ_ERRORS),
        open_npz(io.BytesIO(read_bytes(path))) as content,
    ):
        arrays = {name: content[name] for name in content.files}
    numbers = "finite numbers" if preprocessing is None else "numbers, NaN where one is missing,"
    columns = 0 if target is None or target.classes else target.columns
    targets = f"[n, {columns}] of numbers" if columns else "[n] of class indices"
    form = f"arrays x [n, ...] of {numbers} and y {targets}"
    if not {"x", "y"} <= arrays.keys():
        raise DataError(f"{path} has {', '.join(arrays) or 'nothing'}; expected {form}")
    x, y = arrays["x"], arrays["y"]
    if columns and y.shape == x.shape[:1]:
        y = y[:, None]
    kind = np.number if columns else np.integer
    numeric = np.issubdtype(x.dtype, np.number) and np.issubdtype(y.dtype, kind)
    shape = (*x.shape[:1], columns) if columns else x.shape[:1]
    if not numeric or x.ndim < 2 or y.shape != shape or not len(y):
        raise DataError(
            f"{path}: x is {x.dtype} {x.shape} and y {y.dtype} {y.shape}; expected {form}"
        )
    if columns:
        labels = torch.from_numpy(y.astype(np.float32))
        if not torch.isfinite(labels).all():
            raise DataError(f"{path}: NaN or infinite targets; expected {form}")
    elif (y < 0).any():
        raise DataError(f"{path}: negative labels; expected {form}")
    elif target is not None and y.max() >= target.classes:
        raise DataError(
            f"{path}: a label is {y.max()}, but the models have {target.classes} classes, 0 to "
            f"{target.classes - 1}"
        )
    else:
        labels = torch.from_numpy(y.astype(np.int64))
    if preprocessing is not None:
        if x.dtype == np.uint8 and len(preprocessing.shape) == 3:
            x, _ = arrange(x, "auto", str(path))
            x = x.astype(np.float32) / 255 if unit else x
        elif unit and len(preprocessing.shape) == 3 and (np.nanmin(x) < 0 or np.nanmax(x) > 1):
            warn(
                f"{path}: values of images are from {np.nanmin(x):g} to {np.nanmax(x):g}, but "
                "synthetic ones are in [0, 1]. Divide them, and give --mean and --std if networks "
                "trained on other values"
            )
        with told_as(DataError, str(path), DataError):
            return Samples(preprocessing.apply(x), labels)
    x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise DataError(f"{path}: NaN or infinite values; expected {form}")
    return Samples(torch.from_numpy(x), labels)


def _row(content: dict[str, object], model: Path, path: Path) -> object:
    for key in (str(model), model.name, model.stem):
        if key in content:
            return content[key]
    raise DataError(f"{path} has no counts of {model}. It has {', '.join(content) or 'none'}")
