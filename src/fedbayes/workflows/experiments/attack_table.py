"""What came of attacks, as a table for people and for pages, and as a picture."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedbayes.data.plot import save_figure
from fedbayes.reports.palette import LIGHT
from fedbayes.storage.formatting import words
from fedbayes.workflows.experiments.attack_grid import HONEST, Outcome

DROP = 0.03
"""What an attack may cost before it is marked: accuracy, or the share by which an error rises."""


class AttackTable:
    """The outcomes of a grid, a row for each method and rule, a column for each attack.

    Args:
        outcomes: of `AttackGrid.run`.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._of = {(o.cell.method, o.cell.rule, o.cell.attack): o for o in outcomes}
        self._rows = list(dict.fromkeys((o.cell.method, o.cell.rule) for o in outcomes))
        self._attacks = list(dict.fromkeys(o.cell.attack for o in outcomes))

    def rich(self) -> Table:
        """For a terminal: the rules side by side, which are few."""
        methods, rules = (list(dict.fromkeys(column)) for column in zip(*self._rows, strict=True))
        table = Table("method", "attack", *map(escape, rules), pad_edge=False)
        for method in methods:
            for attack in self._attacks:
                cells = [escape(self._text(self._of[method, rule, attack])) for rule in rules]
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
            cells = [self._text(self._of[(*row, attack)]) for attack in self._attacks]
            marked = [f"**{cell}**" if "▼" in cell else cell for cell in cells]
            lines.append(f"| `{self._method(row)}` | {row[1]} | {' | '.join(marked)} |")
        return "\n".join([*lines, "", *self.notes]) + "\n"

    def json(self) -> list[dict[str, Any]]:
        """All outcomes, one after the other."""
        return [
            {**asdict(o.cell), **{k: v for k, v in asdict(o).items() if k != "cell"}}
            for o in self._of.values()
        ]

    @property
    def notes(self) -> list[str]:
        """What the signs in the cells mean, as far as there are any; and why runs are missing or
        broke off, a sentence each.
        """
        cells = "".join(self._text(outcome) for outcome in self._of.values())
        signs = {
            "▼": f"▼ more than {DROP:g} worse than the honest run",
            "%": "%: success of the attack",
            "×": "×: clients of whom reports were refused",
        }
        legend = "; ".join(meaning for sign, meaning in signs.items() if sign in cells)
        why: dict[str, list[str]] = {}
        for (method, rule, attack), outcome in self._of.items():
            if outcome.trouble and attack == HONEST:
                why.setdefault(outcome.trouble, []).append(f"{method}, {rule}")
            elif outcome.trouble and not self._of[method, rule, HONEST].trouble:
                why.setdefault(outcome.trouble, []).append(f"{method}, {rule}, {attack}")
        return [
            *filter(None, [legend]),
            *(f"{'; '.join(cells)}: {trouble}" for trouble, cells in why.items()),
        ]

    def plot(self, path: Path) -> None:
        """Draw the metrics as a heat map into a PNG, SVG or PDF file."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure

        values = np.array(
            [
                [np.nan if (v := self._of[(*row, a)].value) is None else v for a in self._attacks]
                for row in self._rows
            ]
        )
        size = (2.6 + 0.62 * len(self._attacks), 1.6 + 0.27 * len(self._rows))
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
            text = "–" if np.isnan(value) else f"{value:.2f}"
            axes.text(column, row, text, ha="center", va="center", color=colour, size=7)
        save_figure(figure, path)

    def _method(self, row: tuple[str, str]) -> str:
        """A method, with the metric that it is for where that is not the global accuracy."""
        found = {self._of[(*row, attack)].headline for attack in self._attacks} - {""}
        metric = min(found, default="global_accuracy")
        return row[0] if metric == "global_accuracy" else f"{row[0]} ({words(metric)})"

    def _text(self, outcome: Outcome) -> str:
        """A cell: the metric, a mark where it dropped, and what else there is to tell."""
        if outcome.value is None:
            return "–"
        text = f"{outcome.value:.3f}"
        honest = self._of[outcome.cell.method, outcome.cell.rule, HONEST]
        if honest.value is not None and _worse(honest.value, outcome):
            text += " ▼"
        if outcome.success is not None:
            text += f" {outcome.success:.0%}"
        if outcome.refused:
            text += f" ×{len(outcome.refused)}"
        return text


def _head(attack: str) -> str:
    return "honest" if attack == HONEST else attack


def _worse(honest: float, attacked: Outcome) -> bool:
    """Whether an attack cost more than `DROP`."""
    value = attacked.value
    if value is None or isnan(value):
        return True
    return honest - value > DROP if attacked.higher_is_better else value > honest * (1 + DROP)
