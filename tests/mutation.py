"""What the tests would not notice: mutants of the numerical code, by folder, with their score.

    python -m tests.mutation                                     # all that pyproject.toml lists
    python -m tests.mutation 'fedbayes.matching.*'               # some
    python -m tests.mutation 'fedbayes.m*' --sample 50 --seed 1  # at random, for each pattern
    python -m tests.mutation --again                             # survivors of the last time

mutmut makes the mutants and runs the tests on them; this file samples, adds up by folder, and tells
where the survivors are. It leaves out those that `equivalent_mutants.toml` names, with the reason.
mutmut mutates bodies of functions and methods, but neither properties nor other decorated
functions, nor constants of modules.

A mutant meets the quickest tests that reach its function, within `LONGEST` and `TOGETHER`. The
folder `mutants` keeps mutants and what tests reach until files change; delete it to measure anew.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path
from types import FrameType

import pytest
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.state import state
from mutmut.stats import status_by_exit_code

from tests import ROOT

MUTANTS = ROOT / "mutants"
STATS = MUTANTS / "mutmut-stats.json"
LONGEST, TOGETHER = 1.0, 10.0
"""Seconds of processor time: of a test that mutants meet, and of all tests that a mutant meets."""
SPENT: dict[str, float] = {}
"""The processor time of each test of this process."""
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
    items.sort(key=lambda item: state().duration_by_test.get(item.nodeid, 0.0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Stop long tests: mutants do not meet them, and a mutant that makes a test long is killed."""
    noting = os.environ["MUTANT_UNDER_TEST"] == "stats"  # which functions each test reaches
    seconds = LONGEST if noting else 5 * LONGEST

    def stop(_: int, frame: FrameType | None) -> None:
        while frame and "importlib" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame:  # a module that is half imported would fail later tests
            signal.setitimer(signal.ITIMER_PROF, 0.1)
        else:
            (pytest.skip if noting else pytest.fail)("takes too long")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return (yield)
    except pytest.skip.Exception:
        state()._stats.clear()  # a test that is skipped kills none
        raise
    finally:
        SPENT[item.nodeid] = seconds - signal.setitimer(signal.ITIMER_PROF, 0)[0]


def pytest_sessionfinish() -> None:
    """Keep the quickest of the tests that reach a function; mutmut runs all that are noted."""
    if os.environ["MUTANT_UNDER_TEST"] != "stats":
        return
    took = state().duration_by_test
    took.update(SPENT)
    reached = state().tests_by_mangled_function_name
    for name, tests in reached.items():
        quickest = sorted(tests, key=lambda test: took[test])
        sums = accumulate(took[test] for test in quickest)
        reached[name] = {t for t, spent in zip(quickest, sums, strict=True) if spent <= TOGETHER}


def prepare(jobs: str) -> None:
    """Make all mutants, unchecked, and note what tests reach, as far as files have changed."""
    shutil.rmtree(MUTANTS / "tests", ignore_errors=True)
    if STATS.exists():
        stats, since = json.loads(STATS.read_text()), STATS.stat().st_mtime
        for test in list(stats["duration_by_test"]):
            file = ROOT / test.partition("::")[0]
            if not file.exists() or file.stat().st_mtime > since:
                del stats["duration_by_test"][test]
        for tests in stats["tests_by_mangled_function_name"].values():
            tests[:] = [test for test in tests if test in stats["duration_by_test"]]
        STATS.write_text(json.dumps(stats))
    made = mutmut("run", "--max-children", jobs, "none")  # stops: no mutant has this name
    if not STATS.exists():
        sys.exit(made.stdout + made.stderr)


def forget() -> None:
    """Of the last run, what became of the mutants."""
    for file in MUTANTS.glob("src/**/*.meta"):
        data = json.loads(file.read_text())
        data["exit_code_by_key"] = dict.fromkeys(data["exit_code_by_key"])
        file.write_text(json.dumps(data))


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


def tell() -> None:
    """Print the survivors and the scores; if all mutants were run, excuses that are not needed."""
    counts = {m.path.parent: Counter[str]() for m in mutants() if m.status != "not checked"}
    for mutant in mutants():
        if mutant.status in KILLED:
            counts[mutant.path.parent]["killed"] += 1
    needed = set()
    for mutant, line, before, after, excuse in survivors():
        if excuse is not None:
            counts[mutant.path.parent]["equivalent"] += 1
            needed.add(excuse)
            continue
        counts[mutant.path.parent]["alive"] += 1
        print(f"\n{mutant.path}:{line}  {mutant.name}  ({mutant.status})")
        print(f"  - {before}\n  + {after}")
    print(f"\nTests of up to {LONGEST:g} s, the quickest {TOGETHER:g} s of them for each mutant:")
    print(f"{'folder':32}{'killed':>8}{'alive':>8}{'equivalent':>12}{'score':>9}")
    for path, count in [*counts.items(), (Path("all"), sum(counts.values(), Counter()))]:
        name = path.as_posix().removeprefix("src/fedbayes/")
        score = count["killed"] / max(1, count["killed"] + count["alive"])
        print(f"{name:32}{count['killed']:8}{count['alive']:8}{count['equivalent']:12}{score:9.1%}")
    everything = all(mutant.status != "not checked" for mutant in mutants())
    for place, item in enumerate(EQUIVALENT):
        if everything and place not in needed:
            print(f"no survivor is like {item['change']!r} of equivalent_mutants.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants, with wildcards")
    parser.add_argument("--sample", type=int, help="how many for each of the names, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", action="store_true", help="the last run's survivors alone")
    parser.add_argument("--told", action="store_true", help="run nothing, tell of the last run")
    parser.add_argument("--jobs", default=str(os.cpu_count()), help="processes at the same time")
    options = parser.parse_args()

    os.chdir(ROOT)
    if not options.told:
        wanted = options.names or ["*"]
        if options.again:
            wanted = [mutant.name for mutant, *_, excuse in survivors() if excuse is None]
            if not wanted:
                sys.exit("nothing survived the last time")
        prepare(options.jobs)
        if not options.again:
            forget()
        if options.sample:
            draw, every = random.Random(options.seed), [mutant.name for mutant in mutants()]
            parts = [[name for name in every if fnmatch(name, part)] for part in wanted]
            wanted = [n for p in parts for n in draw.sample(p, min(options.sample, len(p)))]
        if mutmut("run", "--max-children", options.jobs, *wanted, quiet=False).returncode:
            sys.exit("mutmut stopped early; see above")
    tell()


if __name__ == "__main__":
    main()
