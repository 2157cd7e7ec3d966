"""Ratios of the hot paths by release and processor, kept in `benchmarks/history.csv`.

    python benchmarks/history.py                 # measure this checkout, and print the table
    python benchmarks/history.py --root FOLDER   # measure the checkout of another release
    python benchmarks/history.py --show          # print the table

Each number is a ratio that a benchmark of the checkout measures within one run: a round next to a
plain PyTorch loop, a step next to FedAvg's, matching next to the same algorithm without what is
kept. So releases compare also where the machine was busier. Needs MNIST and CIFAR-10.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

from fedbayes.workflows.doctor import examine

ROOT = Path(__file__).parent.parent
FILE = ROOT / "benchmarks" / "history.csv"
COLUMNS = ("release", "date", "processor", "measure", "ratio")
LINES = {
    "round_speed.py": re.compile(r"^(?P<name>\S+ +\S+) +plain .* ratio (?P<ratio>[\d.]+)"),
    "step_speed.py": re.compile(r"^ *(?P<name>[\w ,/é().-]+): (?P<ratio>\d+\.\d+)"),
    "matching_speed.py": re.compile(r"^(?P<name>[^:]+): .* ratio (?P<ratio>[\d.]+)"),
}
"""What a benchmark prints of a ratio: its name and the first number."""


def parsed(script: str, text: str) -> dict[str, float]:
    """The ratios in the output of a benchmark, by name; that of an indented line has the line
    before with a colon at its end.
    """
    ratios, above = {}, ""
    for line in text.splitlines():
        if line.endswith(":"):
            above = f"{line} "
        elif found := LINES[script].match(line):
            name = f"{above * line.startswith(' ')}{' '.join(found['name'].split())}"
            ratios[f"{script.removesuffix('_speed.py')}: {name}"] = float(found["ratio"])
    return ratios


def measured(root: Path) -> dict[str, float]:
    """The ratios of a checkout, by its own benchmarks."""
    ratios: dict[str, float] = {}
    places = os.pathsep.join(str(root / name) for name in ("src", "papers"))
    for script in LINES:
        command = [sys.executable, str(root / "benchmarks" / script)]
        environment = {**os.environ, "PYTHONPATH": places}
        ended = subprocess.run(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if not (found := parsed(script, ended.stdout)):
            print(f"{script} printed no ratio (exit status {ended.returncode})", file=sys.stderr)
        ratios |= found
    return ratios


def rows() -> list[dict[str, str]]:
    """What was measured so far."""
    if not FILE.exists():
        return []
    with FILE.open(newline="") as lines:
        return list(csv.DictReader(lines))


def add(root: Path) -> None:
    """Measure a checkout and write the ratios down; those of an earlier day stay."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    machine = examine().machine
    processor = f"{machine['processor']}, {machine['cores']} cores"
    new = not FILE.exists()
    ratios = measured(root)
    with FILE.open("a", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for name, ratio in ratios.items():
            writer.writerow((project["version"], date.today(), processor, name, f"{ratio:.2f}"))


def show() -> None:
    """The newest ratio of every measure by release, one table for each processor."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows():
        measures = found.setdefault(row["processor"], {})
        measures.setdefault(row["measure"], {})[row["release"]] = row["ratio"]
    for processor, measures in found.items():
        releases = sorted({release for ratios in measures.values() for release in ratios})
        print(
            f"\n{processor}\n\n| measure | {' | '.join(releases)} |\n|---|{'--:|' * len(releases)}"
        )
        for name, ratios in measures.items():
            print(f"| {name} | {' | '.join(ratios.get(each, '–') for each in releases)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    if not given.show:
        add(given.root.resolve())
    show()


if __name__ == "__main__":
    main()
