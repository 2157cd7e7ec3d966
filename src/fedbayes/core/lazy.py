"""Packages whose names are imported when they are asked for: PyTorch takes a second or two."""

import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from fedbayes.core.here import resolving
from fedbayes.errors import ConfigError, FedbayesError, not_among, told_as

Kind = TypeVar("Kind")


def attributes(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, for its `__init__.py`.

    No name may be that of a module of the package, which would take its place once imported.

    Args:
        package: its `__name__`.
        modules: what define its names, with these names, by blanks apart.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

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


IN_MEMORY = "in-memory:"
"""How names begin that stand for Python objects of this process alone."""
_held: dict[str, Any] = {}


def place_of(thing: Any) -> str:
    """The name of a Python object in a config, by which `own` finds it again.

    A class or function of a module is `package.module:name`, for every process. What no other
    process can import (of a script or notebook, of a function, an instance) is kept in this
    process, under a name that begins with `IN_MEMORY`.
    """
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None)
    if name and module != "__main__" and module in sys.modules:
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is thing:
            return f"{module}:{name}"
    word = re.sub(r"\W", "", (name or type(thing).__qualname__).rpartition(".")[2]) or "object"
    for number in count(1):
        place = f"{IN_MEMORY}{word}{f'-{number}' if number > 1 else ''}"
        if _held.setdefault(place, thing) is thing:
            break
    return place


def in_memory(place: object) -> bool:
    """Whether a setting names a Python object that other processes cannot import."""
    return isinstance(place, str) and place.startswith((IN_MEMORY, "__main__:"))


def shown(place: str) -> str:
    """A name in a config for people: of a Python object of this process, its own alone."""
    return place.removeprefix(IN_MEMORY)


def imported(place: str) -> bool:
    """Whether the module of `package.module:name` is imported already, or its object is here."""
    return place in _held or place.partition(":")[0] in sys.modules


def own(place: str) -> Any:
    """What `package.module:name` names; its module is imported, so its code is run.

    Raises:
        ImportError: there is no such module or name, or the module is no Python.
    """
    if place.startswith(IN_MEMORY):
        if place not in _held:
            raise ImportError(GIVE_AGAIN)
        return _held[place]
    module, _, name = place.partition(":")
    parts = (*module.split("."), *name.split("."))
    if not all(part.isidentifier() for part in parts):
        raise ImportError("write it as package.module:name")
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
    """What somebody's own code, `package.module:name`, raised, in words: of which class, and in
    which line of theirs.
    """
    package = place.partition(":")[0].partition(".")[0]
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            where = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    said = str(error).strip()
    return f"{type(error).__name__}{': ' * bool(said)}{said}{where}"


@contextmanager
def own_code(
    error: type[FedbayesError], before: str, place: str, *, after: str = ""
) -> Iterator[None]:
    """Errors of somebody's own code become one of ours, with words around what it raised.

    Args:
        error: of which class; one of it that the code raises stays as it is.
        before: what failed.
        place: `package.module:name` of the code.
        after: the remedy.
    """
    try:
        yield
    except error:
        raise
    except (Exception, SystemExit) as found:
        raise error(f"{before}: {raised(found, place)}{after}") from found


GIVE_AGAIN = (
    "it is a Python object of the process that started the run. Give it to fedbayes.resume "
    "again, as in resume(folder, model=net), or move it to its own file and give it by name "
    "(package.module:name)"
)


def named(place: str, what: str, error: type[FedbayesError] = ConfigError) -> Any:
    """A user's own class, function or other object, `package.module:name`; `what` names it in
    errors.

    Raises:
        FedbayesError: there is none.
    """
    with told_as(error, f"cannot find the {what} {place!r}", ImportError):
        return own(place)


def own_function(place: str, what: str, how: str) -> Any:
    """A user's own function, or a class that is called like one.

    Args:
        place: `package.module:name`.
        what: to call it in errors.
        how: how it is called, for errors: `function(y, clients, rng)`.

    Raises:
        ConfigError: there is none, or it cannot be called.
    """
    found = named(place, what)
    if not callable(found):
        raise ConfigError(
            f"the {what} {place!r} is a {type(found).__name__}. Give a function, called as {how}"
        )
    return found


def called(place: str, what: str, how: str, *arguments: Any, **settings: Any) -> Any:
    """What a user's own function gives; `what` names it in errors, and `how` says how it is called.

    Raises:
        ConfigError: there is none, or it raised an error; the text has its line.
    """
    function = own_function(place, what, how)
    with own_code(ConfigError, f"the {what} {place!r} failed, called as {how}", place):
        return function(*arguments, **settings)


def installed(group: str, name: str) -> str:
    """What an installed package offers under a name, as `package.module:name`; empty if none does.

    Args:
        group: `methods`, say: packages declare entry points in the group `fedbayes.methods`.
        name: of the entry point.
    """
    return next((p.value for p in entry_points(group=f"fedbayes.{group}", name=name)), "")


class Offer(NamedTuple):
    """A thing that an installed package offers by an entry point."""

    name: str
    place: str
    """Where it is, as `package.module:name`."""
    package: str


def offers(group: str, known: Collection[str] = ()) -> list[Offer]:
    """All that installed packages offer in a group, by name.

    Args:
        group: as for `installed`.
        known: names that stand for what there is without packages, which are left out.
    """
    found = dict[str, Offer]()
    for point in entry_points(group=f"fedbayes.{group}"):
        package = point.dist.name if point.dist else ""
        found.setdefault(point.name, Offer(point.name, point.value, package))
    return [found[name] for name in sorted(found.keys() - set(known))]


def placed(what: str, name: Any, known: Collection[str]) -> str:
    """The name of what is known, or `package.module:name` of what an installed package offers.

    Args:
        what: `method`, say: packages offer `fedbayes.methods`.
        name: which of them; `package.module:name` stays as it is.
        known: what there is without packages.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str):
        raise ConfigError(f"the name of the {what} is {name!r}; it must be a string")
    if name in known or ":" in name:
        return name
    if place := installed(f"{what}s", name):
        return place
    raise ConfigError(not_among(what, name, known, "your own as package.module:Class"))


def own_class(place: str, base: Any, what: str) -> Any:
    """A user's own class, which derives from `base`; `what` it is of, for errors.

    Raises:
        ConfigError: there is no such class, it derives from something else, or it lacks methods.
    """
    found = named(place, what)
    if not (isinstance(found, type) and issubclass(found, base)):
        public = base.__module__.rpartition(".")[0]
        raise ConfigError(f"{place!r} is not a class derived from {public}.{base.__name__}")
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        most = ", or derive the class from fedbayes.contracts.PointEstimate, which has most of them"
        raise ConfigError(
            f"the {what} {found.__name__} lacks {', '.join(lacking)}. Define them"
            + (most if what == "method" else "")
        )
    return found
