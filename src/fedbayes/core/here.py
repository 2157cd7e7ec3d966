"""Modules in the folder where the command line was started: found for a user's own names alone.

`package.module:name` may be the user's own and lie there. But libraries try to import optional
modules, as pandas does with `numexpr`, and somebody's files in the folder may be called so. So the
folder is not on `sys.path`. A finder of ours looks into it for the module that is being looked up
(`resolving`), and for what modules that were found so import themselves, whenever they do.
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType

FOLDER = "FEDBAYES_OWN_CODE"
"""Variable of the environment by which processes of a run know the folder."""
_IMPORTING = ("importlib", "pkgutil", "_frozen_importlib", "_frozen_importlib_external")


class _Asked(threading.local):
    """Packages that this thread looks up for the user."""

    def __init__(self) -> None:
        self.packages: list[str] = []


class _OwnModules(MetaPathFinder):
    """Finds a user's own modules, after all others."""

    def __init__(self) -> None:
        self.folder = ""
        self.asked = _Asked()
        self.found: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Where a module of the folder is, if the user asked for it or a module of the user's."""
        if path is not None or not self.folder:
            return None  # modules inside of packages are found where these are
        if fullname not in self.asked.packages and _importer() not in self.found:
            return None
        spec = PathFinder.find_spec(fullname, [self.folder])
        if spec is not None:
            self.found.add(fullname)
        return spec


_finder = _OwnModules()


def _importer() -> str:
    """The package whose code imports something now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _IMPORTING:
            return name.partition(".")[0]
        frame = frame.f_back
    return ""


def only_own_modules(folder: str) -> None:
    """Take an absolute folder off `sys.path`, and find modules there for a user's names alone."""
    shipped = {os.path.dirname(os.__file__)}  # noqa: PTH120  (it is imported already)
    shipped |= {place for place in sys.path if place.endswith(("site-packages", "lib-dynload"))}
    if folder not in shipped:
        real = os.path.realpath(folder)
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != real]
    _finder.folder = folder
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


@contextmanager
def resolving(module: str) -> Iterator[None]:
    """Find a module of the user's in the folder while this lasts."""
    package = module.partition(".")[0]
    _finder.asked.packages.append(package)
    try:
        yield
    finally:
        _finder.asked.packages.remove(package)


if _given := os.environ.get(FOLDER):  # in a process of a run that the command line started
    only_own_modules(_given)


def variables() -> dict[str, str]:
    """Variables by which another process of the same run finds the same modules."""
    return {FOLDER: _finder.folder} if _finder.folder else {}
