"""Packages whose names are imported when they are asked for: PyTorch takes a second or two."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


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
