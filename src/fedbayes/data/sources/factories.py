"""Data of a function of the user's own: one data set for each client, of any common kind."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbayes.core.categories import normal
from fedbayes.core.lazy import named, own_code
from fedbayes.core.wording import listed, size
from fedbayes.data.dataset import Array, Dataset, build_dataset
from fedbayes.data.intake import Narrowing, arrange, names_of, numbers, plain
from fedbayes.data.settings import DataSettings
from fedbayes.data.sources.labels import group_indices, read_target
from fedbayes.data.sources.pictures import Framing, framing
from fedbayes.data.sources.spool import spool
from fedbayes.data.tokens import Tokens
from fedbayes.errors import DataError

BATCH = 512
_FORM = (
    "a dict, or pairs, of client names and data; the data of a client are (x, y) arrays, a torch "
    "Dataset of such pairs, a Hugging Face dataset, a function that returns one of these, or a "
    "dict with train and test of these"
)


@dataclass
class _Reading:
    """What is known of the samples so far."""

    settings: DataSettings
    tokens: Tokens | None = None
    frame: Framing | None = None
    clients: list[str] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    shape: tuple[int, ...] | None = None
    kind: Any = None
    classes: tuple[str, ...] = ()
    first: str = ""
    features: tuple[str, ...] | None = None
    """Names of the columns of all samples so far; empty if some have none."""
    empty: list[str] = field(default_factory=list)
    """Clients without training samples."""
    arranged: str = ""
    narrowing: Narrowing = field(default_factory=Narrowing)


def read_factory(settings: DataSettings, kinds: Sequence[str] = ()) -> Dataset:
    """Call the user's factory as `factory(**arguments)` and read what it returns.

    Clients are taken one by one, and their samples go to the disk, so that memory for one of them
    is enough where the factory returns functions or yields pairs.

    Args:
        settings: name and arguments of the factory, and how texts and pictures are read.
        kinds: kinds of target of which it is to be one; none: the labels decide.

    Raises:
        DataError: there is no such factory, it fails, or returns something else; names the client.
    """
    import pandas as pd

    name = settings.name
    reading = _Reading(settings)
    x = spool(_batches(_called(settings), reading))
    if not len(x):
        raise DataError(f"{name} returned no samples")
    labels = np.concatenate(reading.labels)
    testing = np.array([part == "test" for part in reading.parts])
    order = np.argsort(testing, kind="stable")
    ordered = bool((order == np.arange(len(order))).all())
    features = reading.features if x.ndim == 2 and reading.features else ()
    notes = [reading.arranged] if reading.arranged else []
    notes += reading.narrowing.notes(features, name)
    if empty := reading.empty:
        notes.append(
            f"{name}: {listed(map(repr, empty))} {'has' if len(empty) == 1 else 'have'} no "
            f"training samples and {'is' if len(empty) == 1 else 'are'} left out"
        )
    columns = _columns(labels, settings)
    classes = settings.classes
    y, target = read_target(pd.DataFrame(columns), classes, kinds, name, notes)
    if reading.classes and not classes and target.kind == "class":
        y, target = _named(y, target, reading.classes, name)
    trained = np.array(reading.clients)[~testing]
    index, names = group_indices(trained, name, notes)
    assert index is not None
    place = {client: number for number, client in enumerate(names)}
    groups = np.array([-1 if c == "" else place.get(str(c), -1) for c in reading.clients], np.int64)
    tokens = reading.tokens
    frame = reading.frame
    scale = settings.scale or (255.0 if x.dtype == np.uint8 else 1.0)
    statistics = None
    if tokens is not None:
        statistics = tokens.statistics
    elif frame is not None and x.dtype == np.uint8 and len(frame.mean) in (0, x.shape[1]):
        statistics, scale = frame.statistics, settings.scale or frame.scale
    return build_dataset(
        name,
        x if ordered else x[order],
        y[order],
        target,
        official_train=int((~testing).sum()) if testing.any() else None,
        groups=groups[order],
        group_names=names,
        scale=scale,
        features=features,
        notes=tuple(notes),
        statistics=statistics,
        tokens=tokens,
    )


def _called(settings: DataSettings) -> Any:
    """What the factory returns."""
    name = settings.name
    factory = named(name, "data", DataError)
    after = "; its arguments are those of data.arguments"
    with own_code(DataError, f"{name}(**arguments) failed", name, after=after):
        return factory(**settings.arguments)


def _pairs(returned: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Clients and their data, and the test set of everybody, one by one."""
    if isinstance(returned, Mapping):
        if set(returned) == {"train", "test"} and _is_clients(returned["train"]):
            yield from _pairs(returned["train"], name)
            yield "", {"test": returned["test"]}
            return
        yield from ((normal(client), data) for client, data in returned.items())
        return
    if (
        isinstance(returned, str)
        or not isinstance(returned, Iterable)
        or hasattr(returned, "shape")
    ):
        raise DataError(f"{name} returned a {type(returned).__name__}. Return {_FORM}")
    for number, entry in enumerate(returned):
        if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
            yield normal(entry[0]), entry[1]
        else:
            yield f"client-{number}", entry


def _is_clients(value: Any) -> bool:
    """Whether a value under `train` is clients with their data, and not data."""
    return isinstance(value, Mapping) and not _is_arrays(value)


def _is_arrays(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) <= {"x", "y"}


def _batches(returned: Any, reading: _Reading) -> Iterator[Array]:
    """Samples of all clients, in batches of one type and shape; labels and clients are noted."""
    seen: set[str] = set()
    for client, data in _pairs(returned, reading.settings.name):
        if client in seen:
            raise DataError(f"{reading.settings.name} returned the client '{client}' twice")
        seen.add(client)
        data = _made(data, client, reading)
        parts = {"train": data}
        if isinstance(data, Mapping) and set(data) <= {"train", "test"}:
            parts = {part: data[part] for part in ("train", "test") if part in data}
        if client and "train" not in parts:
            raise DataError(f"{_who(reading, client)}: there are no training samples")
        for part, one in parts.items():
            one = _made(one, client, reading)
            count = 0
            for x, y in _samples(one, client, reading):
                yield _fitting(x, y, client, part, reading)
                count += len(x)
            if client and part == "train" and not count:
                reading.empty.append(client)


def _who(reading: _Reading, client: str) -> str:
    return f"{reading.settings.name}, " + (f"client '{client}'" if client else "the test set")


def _made(data: Any, client: str, reading: _Reading) -> Any:
    """Data, or what a function returns that stands for them."""
    if not callable(data) or hasattr(data, "__getitem__"):
        return data
    make: Callable[[], Any] = data
    failed = f"{_who(reading, client)}: its function failed"
    with own_code(DataError, failed, reading.settings.name):
        return make()


def _samples(data: Any, client: str, reading: _Reading) -> Iterator[tuple[Array, Array]]:
    """Batches of samples and labels."""
    if _is_arrays(data) and set(data) == {"x", "y"}:
        data = (data["x"], data["y"])
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        data = _labelled(data, client, reading)
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "__len__"):
        x, y = data
        yield from _of_arrays(x, y, client, reading)
    elif hasattr(data, "column_names") and hasattr(data, "features"):
        yield from _of_hugging_face(data, client, reading)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        yield from _of_torch(data, client, reading)
    else:
        raise DataError(
            f"{_who(reading, client)}: a {type(data).__name__} cannot be read. Return {_FORM}"
        )


def _labelled(frame: Any, client: str, reading: _Reading) -> tuple[Any, Any]:
    """The features and labels of a table."""
    label = list(reading.settings.label)
    frame = frame.set_axis([normal(name).strip() for name in frame.columns], axis=1)
    if absent := [name for name in label if name not in frame.columns]:
        raise DataError(
            f"{_who(reading, client)}: no column '{absent[0]}'. Set data.label to one of "
            f"{listed(frame.columns)}, or return (x, y)"
        )
    return frame.drop(columns=label), frame[label[0] if len(label) == 1 else label]


def _of_arrays(x: Any, y: Any, client: str, reading: _Reading) -> Iterator[tuple[Array, Array]]:
    who = _who(reading, client)
    if len(x) != len(y):
        raise DataError(f"{who}: {len(x):,} samples and {len(y):,} labels")
    names = names_of(x, who)
    if names:
        x = numbers(x, who)
        if reading.features and names != reading.features:
            if odd := sorted({*names} ^ {*reading.features}):
                raise DataError(
                    f"{who}: column '{odd[0]}' is missing from a client's table, unlike in "
                    f"{reading.first}. Give all clients the same columns"
                )
            x = x[:, [names.index(name) for name in reading.features]]
            names = reading.features
    if len(x):
        reading.features = names if reading.features in (None, names) else ()
    y = y.to_numpy() if hasattr(y, "to_numpy") else y
    for start in range(0, len(x), BATCH):
        yield _array(x[start : start + BATCH], client, reading), _plain(y[start : start + BATCH])


def _of_torch(data: Any, client: str, reading: _Reading) -> Iterator[tuple[Array, Array]]:
    """Of a map-style data set of pairs."""
    for start in range(0, len(data), BATCH):
        failed = f"{_who(reading, client)}: samples from {start:,} on cannot be read"
        after = ". data[i] must be a pair (x, y)"
        with own_code(DataError, failed, reading.settings.name, after=after):
            pairs = [data[row] for row in range(start, min(start + BATCH, len(data)))]
            xs, ys = zip(*((pair[0], pair[1]) for pair in pairs), strict=True)
        yield _array(list(xs), client, reading), _plain(list(ys))


def _of_hugging_face(data: Any, client: str, reading: _Reading) -> Iterator[tuple[Array, Array]]:
    """Of a data set of `datasets`: the columns of the labels, and of the samples."""
    settings, who = reading.settings, _who(reading, client)
    names = list(data.column_names)
    absent = [name for name in settings.label if name not in names]
    if absent:
        raise DataError(f"{who}: no column '{absent[0]}'. Set data.label to one of {listed(names)}")
    if settings.tokens is not None and settings.tokens not in names:
        raise DataError(
            f"{who}: no column '{settings.tokens}'. Set data.tokens to one of {listed(names)}"
        )
    rest = [name for name in names if name not in settings.label]
    if settings.tokens is not None:
        rest = [settings.tokens]
    if len(rest) != 1 and not all(_is_number(data.features[name]) for name in rest):
        raise DataError(
            f"{who}: there are {listed(rest)} besides the label. Keep one of them, or only "
            "numbers (remove_columns). For a text column, set data.tokens"
        )
    (labels,) = (data.features[name] for name in settings.label[:1])
    if len(settings.label) == 1 and hasattr(labels, "names"):
        reading.classes = tuple(labels.names)
    for batch in data.iter(batch_size=BATCH):
        y = np.stack([_plain(batch[name]) for name in settings.label], 1)
        if len(rest) == 1:
            x = _array(batch[rest[0]], client, reading)
        else:
            x = np.stack([np.asarray(batch[name], np.float32) for name in rest], 1)
        yield x, y[:, 0] if y.shape[1] == 1 else y


def _is_number(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint", "float", "bool"))


def _array(x: Any, client: str, reading: _Reading) -> Array:
    """Samples as numbers: texts as tokens, pictures as pixels."""
    who, first = _who(reading, client), x[0] if len(x) else None
    if isinstance(first, str):
        return _tokens(list(x), who, reading)
    if hasattr(first, "convert") and hasattr(first, "mode"):
        return _pixels(x, who, reading)
    values, note = arrange(numbers(x, who), reading.settings.channels, reading.settings.name)
    reading.arranged = reading.arranged or note
    if values.dtype == np.uint8 and values.ndim == 4:
        reading.frame = reading.frame or framing(reading.settings)
    return reading.narrowing.add(values)


def _tokens(texts: list[str], who: str, reading: _Reading) -> Array:
    settings = reading.settings
    if settings.processor is None:
        raise DataError(
            f"{who}: samples are texts, which need a tokenizer. Set data.processor to a "
            "pretrained network's name or folder (with model.name = 'transformers' the default "
            "is the model's)"
        )
    if reading.tokens is None:
        column = settings.tokens or "text"
        reading.tokens = Tokens.of(column, settings.processor, settings.max_tokens)
    ids: Array = reading.tokens.encode(texts, who)
    return ids


def _pixels(images: Any, who: str, reading: _Reading) -> Array:
    frame = reading.frame = reading.frame or framing(reading.settings)
    with ThreadPoolExecutor() as pool:
        arrays = list(pool.map(lambda image: frame.array(image, who), images))
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise DataError(
            f"{who}: pictures have different sizes: {listed(map(size, sorted(shapes)))}. Set "
            "data.size"
        )
    return np.stack(arrays)


def _plain(y: Any) -> Array:
    """Labels as an array, whatever holds them."""
    if hasattr(y, "detach"):
        return np.asarray(plain(y))
    return np.asarray([plain(one) for one in y])


def _fitting(x: Array, y: Array, client: str, part: str, reading: _Reading) -> Array:
    """Note labels and clients of a batch."""
    who = _who(reading, client)
    if reading.shape is None:
        reading.shape, reading.kind, reading.first = x.shape[1:], x.dtype, who
    if x.shape[1:] != reading.shape or x.dtype != reading.kind:
        raise DataError(
            f"{who}: samples are {size(x.shape[1:])} of {x.dtype}, and those of {reading.first} "
            f"{size(reading.shape)} of {reading.kind}. All clients need the same shape and type"
        )
    if x.dtype.kind == "f" and np.isinf(x).any():
        raise DataError(
            f"{who}: the samples have values that are infinite or too large for float32"
        )
    if reading.labels and (y.shape[1:] != reading.labels[0].shape[1:]):
        raise DataError(f"{who}: labels do not have the shape of those of {reading.first}")
    reading.labels.append(y)
    reading.clients += [client] * len(x)
    reading.parts += [part] * len(x)
    return x


def _columns(labels: Array, settings: DataSettings) -> dict[str, Array]:
    """Labels [N] or [N, T] as columns, by name."""
    table = labels.reshape(len(labels), -1)
    if table.shape[1] == len(settings.label):
        names = list(settings.label)
    else:
        names = [f"y{number}" for number in range(table.shape[1])]
    return {name: table[:, number] for number, name in enumerate(names)}


def _named(y: Array, target: Any, classes: tuple[str, ...], name: str) -> tuple[Array, Any]:
    """Class indices by the names that a Hugging Face data set has for them."""
    from dataclasses import replace

    values = np.array([int(text) for text in target.names], np.int64)
    if values.min() < 0 or values.max() >= len(classes):
        raise DataError(f"{name}: a label is outside of its {len(classes)} classes")
    return values[y], replace(target, names=classes)
