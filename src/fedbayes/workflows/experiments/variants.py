"""Methods as they are named on a command line: with a label, and settings of their own."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedbayes.config.config import Config, complete_method, find_method, no_setting, settings
from fedbayes.config.former import COHORT
from fedbayes.config.given import assign, tables
from fedbayes.core.files import parse_toml, read_text
from fedbayes.errors import ConfigError, told_as
from fedbayes.methods import METHODS
from fedbayes.storage.inventory import dotted

SHARED = ("data", "task", "seed", "metrics")
"""What all methods of a comparison have in common: with other data or seeds there is none."""
_BRACKETS = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Variant:
    """A method with settings of its own."""

    label: str
    """What it is called in tables."""
    method: str
    settings: tuple[str, ...] = ()
    """Changes of the config that are its own, as `method.proximal=0.1` or `training.lr=0.05`."""


def variants(text: str) -> list[Variant]:
    """Methods between commas, the tables of a TOML file, or `all` of the package.

    `fedavg,fedprox:proximal=0.1,strong=fedprox:proximal=1:training.lr=0.01` are three: settings are
    behind colons, the method's own without its table, and what is before the name is a label.
    Commas and colons in brackets or quotes are of a setting, as in `fedavg:model.hidden=[50,20]`.

    Raises:
        ConfigError: a name is unknown or named twice, a setting is one that all share, or the file
            cannot be read.
    """
    text = text.strip()
    if text.lower().endswith(".toml"):
        found = _of_file(Path(text))
    else:
        text = ",".join(METHODS) if text == "all" else text
        found = [_of_text(part.strip()) for part in parts(text, ",") if part.strip()]
    return _sound(found)


Methods = str | Sequence[Any] | Mapping[str, Any]
"""Methods as `given_variants` takes them."""


def given_variants(methods: Methods) -> list[Variant]:
    """Methods as Python gives them: text as `variants` takes it, a list of texts, classes and
    instances of methods, or a dict of these by label.

    Raises:
        ConfigError: as for `variants`, or one is something else.
    """
    if isinstance(methods, str):
        return variants(methods)
    labelled = isinstance(methods, Mapping)
    pairs = methods.items() if isinstance(methods, Mapping) else (("", one) for one in methods)
    found: list[Variant] = []
    for label, one in pairs:
        if isinstance(one, str):
            several = [_of_text(part.strip()) for part in parts(one, ",") if part.strip()]
            if labelled and len(several) != 1:
                raise ConfigError(f"methods has {one!r} under {label!r}. Give one method there")
            found += [replace(v, label=str(label)) if labelled else v for v in several]
            continue
        own = tables({"method": one})["method"]
        if not isinstance(own, Mapping) or not isinstance(own.get("name"), str):
            raise ConfigError(
                f"methods has {one!r}. Give names, classes or instances of methods, or settings "
                "with a name"
            )
        settings = changed_from_defaults(own)
        name = str(getattr(find_method(own["name"]), "name", own["name"]))
        shown = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        found.append(
            Variant(
                str(label) if labelled else ":".join([name, *shown]),
                own["name"],
                tuple(f"method.{setting}" for setting in shown),
            )
        )
    return _sound(found)


def changed_from_defaults(own: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a method that differ from their defaults."""
    usual = complete_method({"name": own["name"]})
    return {key: value for key, value in own.items() if value != usual.get(key)}


def _sound(found: list[Variant]) -> list[Variant]:
    """Methods that can be compared."""
    if not found:
        raise ConfigError("--methods is empty. Give some methods, as in --methods fedavg,fedprox")
    for number, variant in enumerate(found):
        find_method(variant.method)
        if not (variant.label.isprintable() and variant.label.strip(". ")):
            raise ConfigError(
                f"{variant.label!r} is not a valid label. Give {variant.method} a label of "
                "printable characters, in one line"
            )
        for setting in variant.settings:
            key = setting.partition("=")[0].strip()
            if key.partition(".")[0] in SHARED:
                raise ConfigError(
                    f"{variant.label} sets {key}, which all methods of a comparison share. "
                    "Compare several configs to vary it"
                )
        for other in found[:number]:
            if folder_name(variant.label) == folder_name(other.label):
                raise ConfigError(
                    f"two methods have the label {variant.label}. Give one another label, as in "
                    f"other={variant.method}:key=value"
                )
    return found


def _of_text(text: str) -> Variant:
    head, *rest = parts(text, ":")
    label, equals, name = head.partition("=")
    if equals:
        text = ":".join([name, *rest])
    name, own = named(text)
    return Variant(
        label.strip() if equals else text, name, tuple(_placed(setting, name) for setting in own)
    )


def parts(text: str, separator: str) -> list[str]:
    """What is between separators that stand in no brackets and no quotes, as a list of TOML does.

    Raises:
        ConfigError: a bracket is not closed.
    """
    found, opened = [""], ""
    for piece in re.findall(r"""'[^']*'|"(?:[^"\\]|\\.)*"|.""", text, re.DOTALL):
        if piece in _BRACKETS:
            opened += _BRACKETS[piece]
        elif opened.endswith(piece):
            opened = opened[:-1]
        if piece == separator and not opened:
            found.append("")
        else:
            found[-1] += piece
    if opened:
        raise ConfigError(f"{text!r} has a bracket that is not closed: {opened[-1]} is missing")
    return found


def _placed(setting: str, method: str) -> str:
    """A setting of a method, or by its name one of the config."""
    key = setting.partition("=")[0].strip()
    of_config = (
        key in (*Config.model_fields, *COHORT) and key not in find_method(method).model_fields
    )
    return setting if "." in key or of_config else f"method.{setting}"


def _of_file(path: Path) -> list[Variant]:
    """Each table is a method by its label, with settings of a config."""
    try:
        tables = parse_toml(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"file of methods not found: {path}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the methods in {path}: {error}") from None
    found = []
    for label, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {label} is not a table. Each table is a method, as "
                f"in\n[{label}]\nmethod.proximal = 0.1"
            )
        own: dict[str, Any] = dict(dotted(table))
        name = own.pop("method.name", label)
        if not isinstance(name, str):
            raise ConfigError(f"{path}: method.name of {label} is not a name")
        given = (f"{key}={json.dumps(value)}" for key, value in own.items() if value != {})
        found.append(Variant(label, name, tuple(given)))
    return found


def named(text: str) -> tuple[str, list[str]]:
    """A name, which may be `package.module:Class`, and the settings behind it, `key=value`.

    Raises:
        ConfigError: it is not of this form.
    """
    found = parts(text, ":")
    settings = [part for part in found if "=" in part]
    name = ":".join(part for part in found if "=" not in part)
    if not name or found[len(found) - len(settings) :] != settings:
        raise ConfigError(f"{text!r} is not a name with settings, as in fedprox:proximal=0.1")
    return name, settings


def folder_name(text: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^\w.=+-]", "_", text)


def own_settings(
    found: Sequence[Variant], overrides: Iterable[str]
) -> tuple[list[Variant], list[str], list[str]]:
    """Give each method those of the common changes that are parameters of methods.

    Args:
        found: the methods.
        overrides: changes for all, as `key=value`; `method.x` is for the methods that have `x`.

    Returns:
        The methods with their changes, those changes that are of the config, and a line for each
        parameter that not all methods have.

    Raises:
        ConfigError: a parameter is one of none of these methods.
    """
    notes: list[str] = []
    changes = list(overrides)
    common = [change for change in changes if change.strip().startswith("method.")]
    rest = [change for change in changes if change not in common]
    given: dict[str, list[str]] = {variant.label: [] for variant in found}
    for override in common:
        key = override.partition("=")[0].strip()
        parameter = key.removeprefix("method.").partition(".")[0]
        takers = [v for v in found if parameter in find_method(v.method).model_fields]
        if not takers:
            method = found[0].method
            raise ConfigError(no_setting(key, settings(method), method))
        if len(takers) < len(found):
            without = ", ".join(v.label for v in found if v not in takers)
            notes.append(
                f"{override} works with {', '.join(v.label for v in takers)}; {without} "
                f"{'have' if len(found) - len(takers) > 1 else 'has'} no such parameter"
            )
        for variant in takers:
            given[variant.label].append(override)
    whole = [Variant(v.label, v.method, (*given[v.label], *v.settings)) for v in found]
    return whole, rest, notes


def settled(base: Config, variant: Variant) -> Config:
    """The config of a method.

    Args:
        base: of all; parameters of its own method count for that method alone, the preset for all.
        variant: the method.

    Raises:
        ConfigError: something is wrong with its settings; the text begins with its label.
    """
    values = base.reopened().model_dump()
    if values["method"]["name"] != variant.method:
        values["method"] = {"name": variant.method, "preset": values["method"]["preset"]}
    with told_as(ConfigError, variant.label, ConfigError):
        for setting in variant.settings:
            assign(values, setting)
        return Config.create(**values)
