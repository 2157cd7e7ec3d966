"""Packages whose names are imported when they are asked for: PyTorch takes a second or two."""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedbayes.errors import ConfigError
from fedbayes.here import resolving

Kind = TypeVar("Kind")


def attributes(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, for its `__init__.py`.

    No name may be that of a module of the package, which would take its place once imported.

    Args:
        package: its `__name__`.
        places: names to the modules that define them.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    def names() -> list[str]:
        own = vars(sys.modules[package])
        shown = (n for n, v in own.items() if n.startswith("__") or isinstance(v, ModuleType))
        return sorted({*own["__all__"], *shown})

    return get, names


class Catalogue(Mapping[str, Kind], Generic[Kind]):
    """Classes by name; a file is imported when its class is asked for, so names cost nothing.

    Args:
        package: whose files they are in.
        places: of each name, the file and the class.
    """

    def __init__(self, package: str, places: Mapping[str, tuple[str, str]]) -> None:
        self._package, self._places = package, places

    def __getitem__(self, name: str) -> Kind:
        file, kind = self._places[name]
        found: Kind = getattr(import_module(f"{self._package}.{file}"), kind)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def own(place: str) -> Any:
    """What `package.module:name` names; its module is imported, so its code is run.

    Raises:
        ImportError: there is no such module or name, or the module is no Python.
    """
    module, _, name = place.partition(":")
    parts = (*module.split("."), *name.split("."))
    if not all(part.isidentifier() for part in parts):
        raise ImportError("it is written as package.module:name")
    try:
        with resolving(module):
            return resolve_name(place)
    except ImportError:
        raise
    except (AttributeError, SyntaxError) as error:
        raise ImportError(str(error)) from None
    except (Exception, SystemExit) as error:  # whatever a module of somebody's own may raise
        raise ImportError(f"{module} cannot be imported: {raised(error, place)}") from error


def raised(error: BaseException, place: str) -> str:
    """What somebody's own code raised, in words: of which class, and in which line of theirs.

    Args:
        error: what was caught.
        place: `package.module:name` of the code.
    """
    package = place.partition(":")[0].partition(".")[0]
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            where = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    said = str(error).strip()
    return f"{type(error).__name__}{': ' * bool(said)}{said}{where}"


def own_class(place: str, base: Any, what: str) -> Any:
    """A user's own class.

    Args:
        place: `package.module:Class`.
        base: what it must derive from.
        what: to call it in errors.

    Raises:
        ConfigError: there is no such class, or it derives from something else.
    """
    try:
        found = own(place)
    except ImportError as error:
        raise ConfigError(f"cannot find the {what} {place!r}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        public = base.__module__.rpartition(".")[0]
        raise ConfigError(f"{place!r} is no class derived from {public}.{base.__name__}")
    return found
