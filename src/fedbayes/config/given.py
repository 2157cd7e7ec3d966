"""Settings as people give them: words, Python objects and shorthands instead of tables.

    run(method="fedprox", data=frame, label="outcome", model=Net, lr=0.05)

Light to import (no PyTorch, no pandas): what somebody gives is of a library that they imported.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedbayes.config.former import COHORT
from fedbayes.core.files import parse_toml, read_text
from fedbayes.core.lazy import GIVE_AGAIN, IN_MEMORY, in_memory, place_of
from fedbayes.data.source_settings import BUILT_IN
from fedbayes.errors import ConfigError
from fedbayes.likelihoods import LIKELIHOODS
from fedbayes.methods import METHODS

WORDS = {"method": "name", "data": "name", "model": "name", "task": "likelihood"}
"""Tables in whose place a word may stand, and the key that it is the value of."""
SHORTHANDS = {
    "clients": "data.clients",
    "partition": "data.partition",
    "alpha": "data.alpha",
    "label": "data.label",
    "group": "data.group",
    "lr": "training.lr",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "optimizer": "training.optimizer",
    "likelihood": "task.likelihood",
}
"""Settings by a word of their own, as options of the command line have it."""


def tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a config has them: names and tables of plain values.

    Args:
        settings: keys of a config. A word, a class, a function, a network, an instance of a method
            or a DataFrame may stand for a table or a name.

    Raises:
        DataError: a DataFrame cannot be stored.
        ModelError: a network has no weights yet.
    """
    return {key: _table(key, v) if key in WORDS else _plain(v) for key, v in settings.items()}


def whole(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as `tables` gives them, of keys among which there may be `SHORTHANDS`.

    Raises:
        ConfigError: a setting is given twice, or a shorthand is of a table that is none.
    """
    found = tables({key: value for key, value in settings.items() if key not in SHORTHANDS})
    for short in SHORTHANDS.keys() & settings.keys():
        name, _, key = SHORTHANDS[short].partition(".")
        table = found.setdefault(name, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} is {table!r}, but {short} is a setting of it. Give a table")
        if key in table:
            raise ConfigError(f"{short} and {name}.{key} are the same setting. Give one of them")
        found[name] = {**table, key: _plain(settings[short])}
    return found


def read(file: Path) -> dict[str, Any]:
    """The settings in a TOML file."""
    try:
        return parse_toml(read_text(file))
    except FileNotFoundError:
        raise ConfigError(f"config file not found: {file}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the config {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def assign(settings: dict[str, Any], override: str) -> None:
    """Apply one `a.b=value`; the value is TOML, or a string if it is not valid TOML.

    Raises:
        ConfigError: it is none, or a part of the key is no table.
    """
    key, equals, text = override.partition("=")
    if key and not equals:
        raise ConfigError(f"{key} has no value. Write key=value, as in training.lr=0.05")
    if not key:
        raise ConfigError(f"{override!r} is not a setting. Write key=value, as in training.lr=0.05")
    if not text.strip():
        raise ConfigError(f"{override} has no value. Leave it out for the default")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except ValueError as error:
        raise ConfigError(f"{key} is not a TOML value: {error}") from None
    key = key.strip()
    if key in COHORT:  # of which a config has one
        for other in COHORT:
            settings.pop(other, None)
    if key in WORDS:  # a word instead of a table
        key = f"{key}.{WORDS[key]}"
    *path, last = key.split(".")
    table = settings
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key} cannot be set: {part} is not a table")
    names = ((["method"], "name"), (["task"], "likelihood"))
    if (path, last) in names and table.get(last, value) != value:
        table.clear()  # the parameters were another method's, or likelihood's
    table[last] = value


def objects(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings that name Python objects which no other process can import, with these names."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from objects(value, f"{prefix}{key}.")
        else:
            items = value if isinstance(value, list | tuple) else [value]
            yield from ((prefix + key, item) for item in items if in_memory(item))


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Settings with other names for some Python objects."""
    if isinstance(value, Mapping):
        return {key: renamed(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def refuse_unknown(settings: Mapping[str, Any], known: Mapping[str, str], file: Path) -> None:
    """See that this process has the objects that a stored config names, or raise a ConfigError."""
    for key, name in objects(settings):
        if name not in known and name.startswith(IN_MEMORY):
            table = key.partition(".")[0]
            raise ConfigError(
                f"{key} in {file} is {name!r}: {GIVE_AGAIN.replace('model=net', f'{table}=...')}"
            )


def refuse_objects(settings: Mapping[str, Any], where: str) -> None:
    """See that processes that `where` starts can import all settings, or raise a ConfigError."""
    for key, place in objects(settings):
        name = place.partition(":")[2]
        raise ConfigError(
            f"{key} is {name}, a Python object of this process: it is defined in the script or "
            f"notebook itself (__main__), within a function, or is an instance. {where} cannot "
            "import it. Move the class or function to its own file, such as mine.py, and import "
            f"it from there (from mine import {name}), or compute only in this process"
        )


def _table(key: str, value: Any) -> Any:
    """A table that a word or a Python object stands for; other values as they are."""
    if isinstance(value, Mapping):
        name = WORDS[key]
        named = {name: value[name]} if name in value else {}
        if named and not isinstance(value[name], str):
            found = _table(key, value[name])
            named = dict(found) if isinstance(found, Mapping) else named
        rest = {k: v if k == "arguments" else _plain(v) for k, v in value.items() if k != name}
        if rest.get("init", "default") != "default":  # its weights are drawn anew
            named = {name: named[name]} if name in named else {}
        return {**named, **rest}
    if isinstance(value, str):
        return _of_data(value) if key == "data" else {WORDS[key]: value}
    if key == "data":
        if isinstance(value, Path):
            return {"path": value}
        if isinstance(value, list | tuple) and value:
            return {"path": value[0], "more": value[1:]}
        if _is_frame(value):
            from fedbayes.data.frame_files import frame_file

            return {"path": frame_file(value), "keep": True}
    if key == "method" and isinstance(value, BaseModel):
        chosen = value.model_dump(mode="json", exclude_none=True)
        return {"name": _name("method", type(value)), **chosen}
    if key == "model" and _is_network(value):
        from fedbayes.models.given import start_file

        return {"name": place_of(value), "weights": start_file(value)}
    return {WORDS[key]: _name(key, value)} if _is_code(value) else value


def _of_data(text: str) -> dict[str, Any]:
    """Data by a word: a set that is known, a function of one's own, or else a file or folder."""
    path = Path(text)
    known = text in (*BUILT_IN, "own", "generator")
    if (
        known
        or not (path.suffix or path.exists() or "/" in text)
        or (":" in text and not path.exists())
    ):
        return {"name": text}
    return {"path": text}


def _name(key: str, thing: Any) -> str:
    """The name of a class or function: its own where it comes with the package."""
    catalogue: Mapping[str, Any] = {"method": METHODS, "task": LIKELIHOODS}.get(key, {})
    name = getattr(thing, "name", None)
    if isinstance(name, str) and name in catalogue and catalogue[name] is thing:
        return name
    return place_of(thing)


def _plain(value: Any) -> Any:
    """A value with names for the classes and functions in it; other values as they are."""
    if isinstance(value, Mapping):
        return {k: v if k == "arguments" else _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    return place_of(value) if _is_code(value) else value


def _is_code(value: Any) -> bool:
    """Whether this is a class, a function, or what is called like one."""
    return callable(value) and not isinstance(value, BaseModel)


def _is_network(value: Any) -> bool:
    """Whether this is a network of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_frame(value: Any) -> bool:
    """Whether this is a DataFrame of pandas, or of a library that can make one of it."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return True
    return hasattr(value, "to_pandas") and hasattr(value, "columns")
