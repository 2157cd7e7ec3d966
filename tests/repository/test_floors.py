"""A file imports only from floors below its own, or from its own folder."""

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fedbayes

ROOT = Path(fedbayes.__file__).parent
FLOORS = [
    {"errors", "version"},
    {"core"},
    {"likelihoods"},
    {"biostatistics", "data", "models", "inference", "matching"},
    {"contracts", "inputs"},
    {"fusion"},
    {"methods"},
    {"federation"},
    {"config"},
    {"storage"},
    {"runs"},
    {"console"},
    {"reports"},
    {"start", "estimators"},
    {"flower"},
    {"workflows"},
    {"cli", "testing"},
    {"__main__"},
]
pytestmark = pytest.mark.xdist_group("floors")  # files are parsed once
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@cache
def nodes_of(path):
    """Imports and classes of a file, and all that only type checkers see."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    typing = [n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    kinds = ast.Import | ast.ImportFrom | ast.ClassDef
    return [n for n in nodes if isinstance(n, kinds)], {m for n in typing for m in n.body}


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def floor(name):
    return next(height for height, rooms in enumerate(FLOORS) if name in rooms)


def imported(path):
    for node in nodes_of(path)[0]:
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [node.module]
            if node.module == "fedbayes":
                modules = [f"fedbayes.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        yield from (m.split(".") for m in modules if m.split(".")[0] == "fedbayes")


def test_imports_go_down():
    for path in FILES:
        _check(path)


def _check(path):
    own = room(path)
    for parts in imported(path):
        other = parts[1] if len(parts) > 1 else ""
        if other == own:
            assert own != "methods" or path.name == "__init__.py", f"{path} imports a method"
            continue
        below = floor(other) < floor(own) or floor(other) == floor(own) == 0
        assert below, f"{path.relative_to(ROOT)} imports fedbayes.{other}"


def module(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def dependencies(path):
    """Files of the package that a file imports when it is loaded or run, types apart."""
    nodes, typing = nodes_of(path)
    for node in nodes:
        if node in typing:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedbayes"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in MODULES)


MODULES = {module(path): path for path in FILES}


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: set(dependencies(path)) - {name} for name, path in MODULES.items()}
    graph |= {other: set() for deps in list(graph.values()) for other in deps if other not in graph}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the files


def test_every_folder_is_a_package():
    folders = {path.parent for path in FILES}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_folders_of_tests_mirror_the_package():
    """Besides there are tests of the papers and of the repository itself."""
    tests = Path(__file__).parent.parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    other = {folder.as_posix() for folder in folders if not (ROOT / folder).is_dir()}
    assert other == {"papers", "repository"}
    assert Path() not in folders
    assert all((tests / folder / "__init__.py").exists() for folder in folders)


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for path in FILES:
        for node in nodes_of(path)[0]:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_the_page_of_architecture_has_every_floor():
    page = (ROOT.parent.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page, re.MULTILINE)
    assert [(int(n), set(re.findall(r"`(\w+)`", places))) for n, places in rows] == [
        *enumerate(FLOORS)
    ][::-1]
