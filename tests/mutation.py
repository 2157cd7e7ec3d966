"""What the tests would not notice: mutants of the numerical code, by file, with their score.

    python -m tests.mutation                         # all of [tool.mutmut] in pyproject.toml
    python -m tests.mutation 'fedbayes.matching.*'   # some
    python -m tests.mutation --sample 200 --seed 1   # a random sample
    python -m tests.mutation --again                 # those that survived the last time

mutmut makes the mutants and runs the tests on them; this file samples, adds up by file, and tells
where the survivors are. It leaves out those that `equivalent_mutants.toml` names, with the reason.
mutmut mutates bodies of functions and methods, but neither properties nor other decorated
functions, nor constants of modules.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

from tests import ROOT

MUTANTS = ROOT / "mutants"
KILLED = {"killed", "timeout", "segfault"}
EQUIVALENT = tomllib.loads((ROOT / "tests/equivalent_mutants.toml").read_text())["mutant"]


@dataclass(frozen=True)
class Mutant:
    name: str
    """`package.module.x_function__mutmut_3` or `package.module.xǁClassǁmethod__mutmut_3`."""
    path: Path
    """The file, from the root of the repository."""
    status: str

    @property
    def function(self) -> list[str]:
        """Class and method, or the function alone."""
        mangled = self.name.rpartition(".")[2].rpartition("__mutmut_")[0]
        return mangled.split("ǁ")[1:] if "ǁ" in mangled else [mangled.removeprefix("x_")]

    def change(self) -> tuple[int, str, str]:
        """Its first line, and the lines before and after."""
        shown = get_diff_for_mutant(self.name, path=self.path).splitlines()
        line, removed, added = 0, [], []
        for text in shown:
            if hunk := re.match(r"@@ -(\d+)", text):
                line = line or int(hunk[1])
            elif text.startswith("-") and not text.startswith("---"):
                removed.append(text[1:].strip())
            elif text.startswith("+") and not text.startswith("+++"):
                added.append(text[1:].strip())
            elif text.startswith(" ") and line and not removed and not added:
                line += 1
        return _first_line(self.path, self.function) + line - 1, " ".join(removed), " ".join(added)


def mutmut(*arguments: str, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    """The command; processes that fork must not have threads."""
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "papers")},
        capture_output=quiet,
        text=True,
        check=False,
    )


def mutants() -> Iterator[Mutant]:
    """All that were made, with what became of them."""
    for file in sorted(MUTANTS.glob("src/**/*.meta")):
        path = file.relative_to(MUTANTS).with_suffix("")
        for name, code in json.loads(file.read_text())["exit_code_by_key"].items():
            yield Mutant(name, path, status_by_exit_code[code])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, when mutmut runs them: most mutants fall to one of those."""
    stats = Path("mutmut-stats.json")
    if stats.exists():
        took = json.loads(stats.read_text())["duration_by_test"]
        items.sort(key=lambda item: took.get(item.nodeid, 0.0))


def _first_line(path: Path, names: list[str]) -> int:
    body = ast.parse((ROOT / path).read_text()).body
    line = 1
    for name in names:
        node = next(n for n in body if getattr(n, "name", None) == name)
        assert isinstance(node, ast.ClassDef | ast.FunctionDef)
        line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        body = node.body
    return line


def survivors() -> Iterator[tuple[Mutant, int, str, str, int | None]]:
    """Those that no test has killed: line, change, and which entry of the list excuses them."""
    for mutant in mutants():
        if mutant.status in KILLED or mutant.status == "not checked":
            continue
        line, before, after = mutant.change()
        excuse = next(
            (
                place
                for place, item in enumerate(EQUIVALENT)
                if fnmatch(str(mutant.path), f"src/fedbayes/{item.get('file', '*')}")
                and re.search(item["change"], f"{before} → {after}")
            ),
            None,
        )
        yield mutant, line, before, after, excuse


def tell(*, everything: bool) -> None:
    """Print the survivors and the scores; if all mutants were run, excuses that are not needed."""
    counts = {m.path: Counter[str]() for m in mutants() if m.status != "not checked"}
    for mutant in mutants():
        if mutant.status in KILLED:
            counts[mutant.path]["killed"] += 1
    needed = set()
    for mutant, line, before, after, excuse in survivors():
        if excuse is not None:
            counts[mutant.path]["equivalent"] += 1
            needed.add(excuse)
            continue
        counts[mutant.path]["alive"] += 1
        print(f"\n{mutant.path}:{line}  {mutant.name}  ({mutant.status})")
        print(f"  - {before}\n  + {after}")
    print(f"\n{'file':32}{'killed':>8}{'alive':>8}{'equivalent':>12}{'score':>9}")
    for path, count in [*counts.items(), (Path("all"), sum(counts.values(), Counter()))]:
        name = path.as_posix().removeprefix("src/fedbayes/")
        score = count["killed"] / max(1, count["killed"] + count["alive"])
        print(f"{name:32}{count['killed']:8}{count['alive']:8}{count['equivalent']:12}{score:9.1%}")
    for place, item in enumerate(EQUIVALENT):
        if everything and place not in needed:
            print(f"no survivor is like {item['change']!r} of equivalent_mutants.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants, with wildcards")
    parser.add_argument("--sample", type=int, help="how many of them, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", action="store_true", help="the last run's survivors alone")
    parser.add_argument("--told", action="store_true", help="run nothing, tell of the last run")
    options = parser.parse_args()

    os.chdir(ROOT)
    if not (options.again or options.told):
        shutil.rmtree(MUTANTS, ignore_errors=True)
    wanted = options.names
    if options.again:
        wanted = [mutant.name for mutant, *_, excuse in survivors() if excuse is None]
        if not wanted:
            sys.exit("nothing survived the last time")
    elif options.sample:
        mutmut("run", "none")  # makes them all, finds none of this name and stops
        every = [m.name for m in mutants() if any(fnmatch(m.name, w) for w in wanted or ["*"])]
        wanted = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    if not options.told and mutmut("run", *wanted, quiet=False).returncode:
        sys.exit("mutmut stopped early; see above")
    tell(everything=not (options.names or options.sample or options.again))


if __name__ == "__main__":
    main()
