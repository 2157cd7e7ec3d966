"""Tables of a comparison: for a terminal, for a page, for a paper, for other programs."""

import csv
import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbayes.workflows.experiments.comparison import MORE, Compared, Figure, heading, printed
from fedbayes.workflows.experiments.method_grid import RunResult

EMPTY = "–"
"""A metric that a method has not."""


def cell(name: str, figure: Figure | None) -> str:
    """Mean and standard deviation for people, without marks."""
    if figure is None:
        return EMPTY
    mean, std = printed(name, figure.mean), figure.std
    if std is None or (name == "bytes" and not std):
        return mean
    rest = mean.partition(".")[2]
    same = rest.isdigit() and abs(figure.mean) >= 1e-3  # as many digits behind the point
    return f"{mean} ± {f'{std:.{len(rest)}f}' if same else printed(name, std)}"


def marked(name: str, figure: Figure | None) -> str:
    """The same, and `*` behind the best, `≈` behind what is not told apart from it."""
    text = cell(name, figure)
    if figure is not None and (figure.best or figure.near):
        text += "*" if figure.best else "≈"
    return text


def rich_tables(table: Compared, width: int) -> list[Table]:
    """For a terminal: a row for each method, and where columns are too many for one table, several.

    Args:
        table: of a config.
        width: of the terminal.
    """
    return folded(cells(table), width, title(table))


def folded(cells: Sequence[Sequence[str]], width: int, title: str = "") -> list[Table]:
    """Rows for a terminal, with their labels and all figures whole: in several tables where columns
    are too many for one.

    Args:
        cells: headings, and below them rows, each with its label first.
        width: of the terminal.
        title: over the first table.
    """
    (head, *labels), *columns = zip(*cells, strict=True)
    longest = max(map(len, (head, *labels)))
    parts: list[list[tuple[str, ...]]] = [[]]
    room = first = width - min(longest, max(width // 3, _LABEL)) - 3
    for column in columns:
        needed = max(map(len, column)) + 3
        if needed > room and parts[-1]:
            parts.append([])
            room = first
        parts[-1].append(column)
        room -= needed
    return [
        _shown([(head, *labels), *part], "" if place else title) for place, part in enumerate(parts)
    ]


_LABEL = 20
"""Characters that a label has at least before it is folded."""


def _shown(columns: Sequence[Sequence[str]], title: str) -> Table:
    shown = Table(pad_edge=False, title=escape(title) or None)
    shown.title_justify, shown.title_style = "left", "bold"
    for place, (head, *_) in enumerate(columns):
        shown.add_column(escape(head), overflow="fold", no_wrap=bool(place))
    for label, *texts in zip(*(rest for _, *rest in columns), strict=True):
        best = [f"[bold]{escape(t)}[/]" if t.endswith("*") else escape(t) for t in texts]
        shown.add_row(f"[bold]{escape(label)}[/]", *best)
    return shown


def title(table: Compared) -> str:
    """The config and the number of seeds, over its table."""
    count = len(table.seeds)
    return f"{table.task}, {count} seed{'s' * (count > 1)}"


def cells(table: Compared) -> list[list[str]]:
    """Headings, and the rows below them."""
    return [
        ["method", *map(heading, table.columns)],
        *(
            [label, *(marked(name, row.figures.get(name)) for name in table.columns)]
            for label, row in zip(table.labels, table.rows, strict=True)
        ),
    ]


def text(tables: Sequence[Compared], said: Sequence[str]) -> str:
    """As plain text, with the notes below."""
    file = io.StringIO()
    console = Console(file=file, width=200, color_system=None, emoji=False)
    for table in tables:
        console.print(*rich_tables(table, 200), sep="\n")
    for line in said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def markdown(tables: Sequence[Compared], said: Sequence[str]) -> str:
    """As Markdown: the best in bold."""
    parts = []
    for table in tables:
        lines = [f"**{title(table)}**", ""] if len(tables) > 1 else []
        lines.append("| method | " + " | ".join(map(heading, table.columns)) + " |")
        lines.append("|---" + "|--:" * len(table.columns) + "|")
        for label, row in zip(table.labels, table.rows, strict=True):
            cells = []
            for name in table.columns:
                figure, shown = row.figures.get(name), marked(name, row.figures.get(name))
                best = figure is not None and figure.best
                cells.append(f"**{shown.removesuffix('*')}**" if best else shown)
            cells = [_code(label).replace("|", "\\|"), *cells]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    legend = [line.replace("* best mean", "**Bold**: best mean") for line in said]
    return "\n\n".join([*parts, *legend]) + "\n"


def _code(words: str) -> str:
    """As code in Markdown, between more backticks than there are in it."""
    if "`" not in words:
        return f"`{words}`"
    fence = "`" * (max(map(len, re.findall("`+", words))) + 1)
    return f"{fence} {words} {fence}"


def latex(tables: Sequence[Compared], said: Sequence[str]) -> str:
    r"""As LaTeX for the package booktabs: the best in bold, what is not told apart underlined."""
    comments = [f"% {line}" for note in said for line in note.splitlines()]
    parts = ["% \\usepackage{booktabs}", *comments]
    parts.append("% Here: \\textbf the best mean, \\underline not significantly different from it.")
    for table in tables:
        lines = ["\\begin{tabular}{l" + "r" * len(table.columns) + "}", "\\toprule"]
        lines.append(" & ".join(map(_latex, ("method", *map(heading, table.columns)))) + r" \\")
        lines.append("\\midrule")
        for label, row in zip(table.labels, table.rows, strict=True):
            cells = [_latex_cell(name, row.figures.get(name)) for name in table.columns]
            lines.append(" & ".join([_latex(label), *cells]) + r" \\")
        parts.append("\n".join([f"% {title(table)}", *lines, "\\bottomrule", "\\end{tabular}"]))
    return "\n".join(parts) + "\n"


def _latex(words: str) -> str:
    return words.translate(_SIGNS)


_SIGNS = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        **{sign: f"\\{sign}" for sign in "_%&#${}"},
    }
)


def _latex_cell(name: str, figure: Figure | None) -> str:
    shown = "--" if figure is None else _latex(cell(name, figure)).replace(" ± ", r" $\pm$ ")
    if figure is not None and figure.best:
        return rf"\textbf{{{shown}}}"
    return rf"\underline{{{shown}}}" if figure is not None and figure.near else shown


def means_csv(tables: Sequence[Compared]) -> str:
    """Means and deviations as CSV, a row for each method; empty where it has no such metric."""
    names = list(dict.fromkeys(name for table in tables for name in (*table.columns, *MORE)))
    having = [n for n in names if any(n in row.figures for t in tables for row in t.rows)]
    lines: list[list[object]] = [
        ["task", "method", "seeds", *(f"{name}{end}" for name in having for end in ("", "_std"))]
    ]
    for table in tables:
        for row in table.rows:
            found = [row.figures.get(name) for name in having]
            pairs = [
                ("", "") if f is None else (f.mean, "" if f.std is None else f.std) for f in found
            ]
            values = [value for pair in pairs for value in pair]
            lines.append([table.task, row.variant.label, len(row.seeds), *values])
    return _csv(lines)


def runs_csv(outcomes: Sequence[RunResult]) -> str:
    """Metrics of all runs as CSV, a row for each."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.values))
    lines: list[list[object]] = [["task", "method", "seed", *names, "trouble"]]
    for one in outcomes:
        values = ["" if (v := one.values.get(name)) is None else v for name in names]
        place = one.cell
        lines.append([place.task, place.label, place.seed, *values, one.trouble])
    return _csv(lines)


def _csv(lines: Sequence[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()
