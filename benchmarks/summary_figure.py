"""The figure of docs/benchmarks/index.md, from the tables on that page.

python benchmarks/summary_figure.py
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt

from fedbayes.reports.palette import LIGHT, looks

DOCS = Path(__file__).parent.parent / "docs"
ROW = re.compile(r"^\| `([\w-]+)(?:, ([\w-]+))?` \| \**(0\.\d+) ± (0\.\d+)", re.MULTILINE)


def rows(text: str) -> dict[str, tuple[str, float, float]]:
    """Method, mean and standard deviation of the global accuracy by label, in rising order."""
    found = {
        f"{name}, {form}" if form else name: (name, float(mean), float(std))
        for name, form, mean, std in ROW.findall(text)
    }
    return dict(sorted(found.items(), key=lambda row: row[1][1]))


def main() -> None:
    text = (DOCS / "benchmarks" / "index.md").read_text()
    parts = {
        "MNIST": re.search(r"^### MNIST .*?(?=^The methods ahead)", text, re.M | re.S),
        "CIFAR-10": re.search(r"^### CIFAR-10 .*?(?=^### )", text, re.M | re.S),
    }
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.8), layout="constrained")
    for axis, (title, part) in zip(axes, parts.items(), strict=True):
        assert part is not None
        found = rows(part[0])
        for place, (name, mean, std) in enumerate(found.values()):
            (look,) = looks([name])
            axis.errorbar(
                mean, place, xerr=std, fmt=look.marker, color=look.colour(LIGHT), capsize=2
            )
        axis.set_yticks(range(len(found)), list(found), fontsize=8)
        axis.axvline(found["fedavg"][1], color=LIGHT.faint, linewidth=0.8, zorder=0)
        axis.set(title=title, xlabel="global accuracy")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "figures" / "methods.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
