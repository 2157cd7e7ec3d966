"""What came of attacks, as a table for people and for pages, and as a picture."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedbayes.data.plot import save_figure
from fedbayes.reports.palette import LIGHT
from fedbayes.storage.formatting import words
from fedbayes.workflows.experiments.attack_grid import HONEST, AttackCell, AttackResult

DROP = 0.03
"""What an attack may cost before it is marked: accuracy, or the share by which an error rises."""


class AttackTable:
    """The outcomes of a grid, a row for each method and rule, a column for each attack.

    Args:
        outcomes: of `AttackGrid.run`.
    """

    def __init__(self, outcomes: Sequence[AttackResult]) -> None:
        self._of = {outcome.cell: outcome for outcome in outcomes}
        self._seeds = [run.seed for run in outcomes[0].runs]
        self._rows = list(dict.fromkeys((o.cell.method, o.cell.rule) for o in outcomes))
        self._attacks = list(dict.fromkeys(o.cell.attack for o in outcomes))

    def rich(self) -> Table:
        """For a terminal: the rules side by side, which are few."""
        methods, rules = (list(dict.fromkeys(column)) for column in zip(*self._rows, strict=True))
        table = Table("method", "attack", *map(escape, rules), pad_edge=False)
        for method in methods:
            for attack in self._attacks:
                cells = [escape(self._text(self._at((method, rule), attack))) for rule in rules]
                marked = [f"[bold red]{cell}[/]" if "▼" in cell else cell for cell in cells]
                name = self._method((method, rules[0])) if attack == self._attacks[0] else ""
                table.add_row(f"[bold]{escape(name)}", escape(_head(attack)), *marked)
            table.add_section()
        return table

    def markdown(self) -> str:
        """For a page: a table, and under it why cells are empty."""
        heads = map(_head, self._attacks)
        lines = [f"| method | rule | {' | '.join(heads)} |"]
        lines.append("|---|---" + "|--:" * len(self._attacks) + "|")
        for row in self._rows:
            cells = [self._text(self._at(row, attack)) for attack in self._attacks]
            marked = [f"**{cell}**" if "▼" in cell else cell for cell in cells]
            lines.append(f"| `{self._method(row)}` | {row[1]} | {' | '.join(marked)} |")
        return "\n".join([*lines, "", *self.notes]) + "\n"

    def json(self) -> list[dict[str, Any]]:
        """Return all outcomes as one list."""
        return [{**(facts := asdict(o)).pop("cell"), **facts} for o in self._of.values()]

    @property
    def notes(self) -> list[str]:
        """Explain the signs in the cells, and why runs are missing or were interrupted.

        Returns:
            A sentence each.
        """
        cells = "".join(self._text(outcome) for outcome in self._of.values())
        signs = {
            "±": f"mean ± standard deviation over {len(self._seeds)} seeds",
            "▼": f"▼ more than {DROP:g} worse than the honest run",
            "%": "%: success of the attack",
            "×": "×: clients whose reports the server rejected",
        }
        legend = "; ".join(meaning for sign, meaning in signs.items() if sign in cells)
        why: dict[str, dict[str, list[int]]] = {}
        for outcome in self._of.values():
            name = str(outcome.cell).removesuffix(f", {HONEST}")
            for run, honest in zip(outcome.runs, self._honest(outcome).runs, strict=True):
                if run.trouble and (run is honest or not honest.trouble):
                    why.setdefault(run.trouble, {}).setdefault(name, []).append(run.seed)
        return [
            *filter(None, [legend]),
            *(f"{'; '.join(map(self._under, w, w.values()))}: {t}" for t, w in why.items()),
        ]

    def _under(self, name: str, seeds: Sequence[int]) -> str:
        """The name of a cell, with the seeds if they are not all."""
        every = len(seeds) == len(self._seeds)
        return name if every else f"{name}, seed {', '.join(map(str, seeds))}"

    def _at(self, row: tuple[str, str], attack: str) -> AttackResult:
        return self._of[AttackCell(*row, attack)]

    def _honest(self, outcome: AttackResult) -> AttackResult:
        return self._of[outcome.cell.honest]

    def plot(self, path: Path) -> None:
        """Draw the metrics as a heat map into a PNG, SVG or PDF file."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure

        cells = [[self._at(row, attack) for attack in self._attacks] for row in self._rows]
        values = np.array([[o.value for o in row] for row in cells], float)
        height = 0.27 if len(self._seeds) == 1 else 0.36
        size = (2.6 + 0.62 * len(self._attacks), 1.6 + height * len(self._rows))
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        ramp = LinearSegmentedColormap.from_list("", [LIGHT.paper, LIGHT.heat])
        top = max(1.0, float(np.nanmax(values)))
        image = axes.imshow(values, cmap=ramp, vmin=0, vmax=top, aspect="auto")
        metrics = {words(o.headline) for o in self._of.values() if o.headline}
        figure.colorbar(image, ax=axes, label=", ".join(sorted(metrics)))
        heads = [_head(attack) for attack in self._attacks]
        axes.set_xticks(range(len(heads)), heads, rotation=45, ha="right")
        axes.set_yticks(
            range(len(self._rows)), [f"{self._method(row)}, {row[1]}" for row in self._rows]
        )
        for (row, column), value in np.ndenumerate(values):
            colour = LIGHT.paper if value > top / 2 else LIGHT.ink
            spread = _spread(value, cells[row][column].std, 2, gap="\n")
            text = "–" if np.isnan(value) else spread
            axes.text(column, row, text, ha="center", va="center", color=colour, size=7)
        save_figure(figure, path)

    def _method(self, row: tuple[str, str]) -> str:
        """A method, with the metric that it is for where that is not the global accuracy."""
        found = {self._at(row, attack).headline for attack in self._attacks} - {""}
        metric = min(found, default="global_accuracy")
        return row[0] if metric == "global_accuracy" else f"{row[0]} ({words(metric)})"

    def _text(self, outcome: AttackResult) -> str:
        """A cell: the metric, a mark where it dropped, and what else there is to tell."""
        if outcome.value is None:
            return "–"
        text = _spread(outcome.value, outcome.std, 3)
        honest = self._honest(outcome).value
        if honest is not None and _worse(honest, outcome):
            text += " ▼"
        if outcome.success is not None:
            share = _spread(outcome.success, outcome.success_std, 0, 100) + "%"
            text += f" {share}" if outcome.success_std is None else f" ({share})"
        if any(run.refused for run in outcome.runs):
            text += f" ×{fmean(len(run.refused) for run in outcome.runs):.3g}"
        return text


def _spread(mean: float, std: float | None, digits: int, unit: int = 1, gap: str = " ") -> str:
    """A mean, and the standard deviation where there is one."""
    more = "" if std is None else f"{gap}± {unit * std:.{digits}f}"
    return f"{unit * mean:.{digits}f}{more}"


def _head(attack: str) -> str:
    return "honest" if attack == HONEST else attack


def _worse(honest: float, attacked: AttackResult) -> bool:
    """Whether an attack cost more than `DROP`."""
    value = attacked.value
    if value is None or isnan(value):
        return True
    return honest - value > DROP if attacked.higher_is_better else value > honest * (1 + DROP)
