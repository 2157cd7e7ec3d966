"""Draw the pictures of the README and of the pages, each for light and for dark paper.

    python docs/figures/draw.py                        # all: runs on digits, half an hour
    python docs/figures/draw.py four-steps deployment  # the diagrams, at once
    python docs/figures/draw.py fusion --runs DIR      # with runs that an earlier call left in DIR

Pictures are 700 pixels wide, in the colours of `fedbayes.reports.palette`. Numbers are those of the
runs; `numbers.json` has them, and tests/repository/test_figures.py compares the README with it.
"""

import argparse
import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import fedbayes
from fedbayes.reports.charts import diagram
from fedbayes.reports.palette import BLUE, DARK, GREEN, LIGHT, ORANGE, Look, Theme, looks, mixed
from fedbayes.workflows.calibrate.calibration import trust

HERE = Path(__file__).parent
THEMES = {"light": LIGHT, "dark": DARK}
NAMES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedadam": "FedAdam",
    "laplace": "Laplace",
    "fedsparse": "FedSparse",
    "feddrop": "FedDrop",
    "fedl1": "FedL1",
    "pvi": "PVI",
    "fedlap": "FedLap",
    "fedpa": "FedPA",
    "virtual": "VIRTUAL",
    "local": "Local",
}
LANDSCAPE = [name for name in NAMES if name not in ("local", "virtual")]
"""Methods of one global model."""
REPORTED = ("fedavg", "fedsparse", "pvi")


def command(*words: object) -> str:
    """A command of fedbayes, as it is typed; what it prints on stdout."""
    typed = [sys.executable, "-m", "fedbayes", *map(str, words)]
    print("fedbayes", *words, flush=True)
    return subprocess.run(typed, check=True, stdout=subprocess.PIPE, text=True).stdout


def style(theme: Theme) -> dict[str, Any]:
    """The settings of Matplotlib for a theme."""
    return {
        "svg.fonttype": "path",
        "svg.hashsalt": "fedbayes",
        "font.size": 10.5,
        "font.family": "DejaVu Sans",
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": mixed(theme.ink, theme.paper, 0.12),
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
    }


def save(name: str, height: float, draw: Callable[[Figure, Theme], None]) -> None:
    """A figure as `NAME-light.svg` and `NAME-dark.svg`.

    Args:
        name: of the picture.
        height: in units of 100 pixels.
        draw: fills the figure.
    """
    for word, theme in THEMES.items():
        with rc_context(style(theme)):
            figure = Figure(figsize=(7, height), dpi=100, layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure, theme)
            figure.savefig(HERE / f"{name}-{word}.svg", metadata={"Date": None})


def look_of(method: str) -> Look:
    """The look of a method."""
    return looks([method])[0]


def note(name: str, numbers: dict[str, Any]) -> None:
    """Keep the numbers of a picture."""
    file = HERE / "numbers.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept[name] = numbers
    file.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


# What each picture shows.


def frameworks(runs: Path) -> None:
    """Rounds a second of each framework in the table of `features.md`, by workload."""
    lines = (HERE.parent / "benchmarks" / "features.md").read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| framework |"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[head:]]
    rows = rows[: next(number for number, row in enumerate(rows) if not row)]
    names = [row[0].replace("`", "") for row in rows[2:]]

    def draw(figure: Figure, theme: Theme) -> None:
        panels = figure.subplots(1, 3, sharey=True)
        for column, axes in enumerate(panels, 1):
            rates = [float(row[column].partition(",")[0]) for row in rows[2:]]
            ours = [name.startswith("fedbayes") for name in names]
            colours = [theme.hues[ORANGE if own else BLUE] for own in ours]
            axes.hlines(range(len(rates)), 1, rates, colors=colours, lw=2)
            axes.scatter(rates, range(len(rates)), color=colours, zorder=2)
            axes.set(xscale="log", xlim=(0.03, 6), title=fill(rows[0][column], 20))
            axes.set_xticks([0.1, 1], ["0.1", "1"])
            axes.grid(axis="y", visible=False)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].tick_params(axis="y", length=0, colors=theme.ink)
        panels[0].invert_yaxis()
        figure.supxlabel("rounds a second, relative to fedbayes, workers", fontsize=10.5)

    save("frameworks", 3.3, draw)


def report(runs: Path) -> None:
    """The report of three methods, as a browser shows it."""
    folders = [runs / name for name in REPORTED]
    for name, folder in zip(REPORTED, folders, strict=True):
        if not (folder / "SHA256SUMS").exists():
            command("run", "--method", name, "--rounds", 20, "--out", folder)
    page = runs / "report.html"
    command("report", *folders, "-o", page)
    for word in THEMES:
        (HERE / f"report-{word}.png").write_bytes(photograph(page, word, 980, 1160))
    found = {one.name: json.loads((one / "summary.json").read_text()) for one in folders}
    note("report", {name: one["global_accuracy"] for name, one in found.items()})


def photograph(page: Path, theme: str, width: int, height: int) -> bytes:
    """The top of a page in Chromium, as PNG."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options)
    try:
        scheme = [{"name": "prefers-color-scheme", "value": theme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        size = {"width": width, "height": height, "deviceScaleFactor": 1.5, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.resolve().as_uri())
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {})
        return base64.b64decode(shot["data"])
    finally:
        browser.quit()


def fusion(runs: Path) -> None:
    """Ten networks, their average and ensemble, and the network that `fuse` makes of them."""
    apart, fused, scores = runs / "apart", runs / "fused.safetensors", runs / "scores.json"
    if not (apart / "SHA256SUMS").exists():
        command("run", "--method", "local", "--rounds", 30, "--out", apart)
    clients = sorted((apart / "clients").glob("*.safetensors"))
    if not scores.exists():
        if not fused.exists():
            command("fuse", *clients, "-o", fused)
        scores.write_text(command("evaluate", fused, *clients, "--run", apart, "--json"))
    found = {one["name"]: one["accuracy"] for one in json.loads(scores.read_text())}
    own = [found[str(name)] for name in clients]
    rows = {
        "one client's network": (own, "member"),
        "average of the weights": ([found["average of the inputs"]], "average"),
        "fused network": ([found[str(fused)]], "function"),
        "all ten as an ensemble": ([found["ensemble, as fuse learns it"]], "ensemble"),
    }

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for row, (values, kind) in enumerate(rows.values()):
            colour = look_of(kind).colour(theme)
            if len(values) > 1:
                axes.plot(values, [row] * len(values), "o", color=colour, alpha=0.7, ms=7)
                text = f"{min(values):.2f} to {max(values):.2f}"
            else:
                axes.barh(row, values[0], 0.55, color=colour)
                text = f"{values[0]:.3f}"
            axes.text(max(values) + 0.02, row, text, va="center")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.tick_params(axis="y", length=0, colors=theme.ink)
        axes.set(xlim=(0, 1.08), xlabel="accuracy on all clients' test samples")
        axes.set_ylim(len(rows) - 0.55, -0.5)
        axes.grid(axis="y", visible=False)

    save("fusion", 2.4, draw)
    note("fusion", {label: [round(v, 4) for v in values] for label, (values, _) in rows.items()})


def landscape(runs: Path) -> None:
    """Accuracy of every method next to the bytes that it sent."""
    out, seeds = runs / "landscape", 3
    words = ("--alpha", 0.1, "--rounds", 30, "--seeds", seeds, "--ood", "none", "--out", out)
    command("compare", "--methods", ",".join(LANDSCAPE), *words)
    rows = []
    for name in LANDSCAPE:
        for folder in sorted((out / "digits" / name).glob("seed-*")):
            one = json.loads((folder / "summary.json").read_text())
            sent = one["bytes_down"] + one["bytes_up"]
            accuracy = one["global_accuracy"]
            rows.append({"method": name, "sent": sent / 1e6, "accuracy": accuracy})
    found = pd.DataFrame(rows).groupby("method").agg(["mean", "std"]).loc[LANDSCAPE]

    order = list(found["accuracy", "mean"].sort_values(ascending=False).index)

    def draw(figure: Figure, theme: Theme) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for row, name in enumerate(order):
            look, one = look_of(name), found.loc[name]
            colour = look.colour(theme)
            mean, sd, sent = one["accuracy", "mean"], one["accuracy", "std"], one["sent", "mean"]
            left.errorbar(mean, row, xerr=sd, fmt=look.marker, color=colour, ms=8, capsize=3)
            right.barh(row, sent, 0.6, color=colour)
            right.text(sent + 0.6, row, f"{sent:.0f}", va="center")
        left.set_yticks(range(len(order)), [NAMES[name] for name in order])
        left.tick_params(axis="y", length=0, colors=theme.ink)
        left.set(xlabel="accuracy of the global model", ylim=(len(order) - 0.4, -0.6))
        right.set(xlabel="sent in all rounds, MB", xlim=(0, 1.15 * found["sent", "mean"].max()))
        right.tick_params(axis="y", length=0)
        right.grid(axis="y", visible=False)

    save("landscape", 3.9, draw)
    note("landscape", {n: [round(float(v), 4) for v in found.loc[n]] for n in LANDSCAPE})


def calibration(runs: Path) -> None:
    """Confidence against accuracy, before and after the temperature that a run finds."""
    folder = runs / "posterior"
    if not (folder / "SHA256SUMS").exists():
        words = ("method.kl_weight=1", "training.optimizer=adam", "training.lr=0.003")
        given = [word for one in words for word in ("--set", one)]
        command("run", "--method", "pvi", *given, "--rounds", 20, "--out", folder)
    panels = {}
    for title, scaled in (("before", False), ("after", True)):
        found = trust(folder, temperature=scaled)
        assert found.calibration is not None
        panels[title] = diagram(found.calibration), found.metrics["nll"]

    def draw(figure: Figure, theme: Theme) -> None:
        colour = look_of("pvi").colour(theme)
        for axes, (title, (found, nll)) in zip(
            figure.subplots(1, 2, sharey=True), panels.items(), strict=True
        ):
            x, y = ([getattr(b, f) for b in found.bins] for f in ("confidence", "accuracy"))
            axes.plot([0, 1], [0, 1], color=theme.faint, lw=1, ls="--")
            axes.fill_between(x, x, y, color=colour, alpha=0.2, lw=0)
            axes.plot(x, y, "-^", color=colour, ms=7)
            axes.set_title(f"{title}: error {found.error:.3f}, NLL {nll:.3f}")
            axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", aspect="equal")
        figure.axes[0].set_ylabel("share of right predictions")

    save("calibration", 3.9, draw)
    note("calibration", {t: [round(f.error, 4), round(n, 4)] for t, (f, n) in panels.items()})


def clients(runs: Path) -> None:
    """The loss of every hospital under three methods."""
    del runs
    from sklearn.datasets import load_breast_cancer
    from sklearn.metrics import log_loss
    from sklearn.model_selection import train_test_split

    X, benign = load_breast_cancer(return_X_y=True, as_frame=True)
    y = 1 - benign
    rng = np.random.default_rng(1)
    size = X["mean radius"].rank(pct=True) + rng.normal(0, 0.25, len(X))
    places = pd.cut(size.rank(pct=True), [0, 0.1, 0.25, 0.45, 0.7, 1], labels=list("ABCDE"))
    hospital = places.astype(str)
    kind = hospital + y.astype(str)
    X, X_test, y, y_test, h, h_test = train_test_split(
        X, y, hospital, test_size=0.5, stratify=kind, random_state=0
    )
    losses: dict[str, list[float]] = {}
    for method in ("local", "fedavg", "virtual"):
        model = fedbayes.FederatedClassifier(
            method, model={"hidden": [20]}, rounds=60, random_state=0
        ).fit(X, y, clients=h)
        own = {} if method == "fedavg" else {"client": h_test}
        p = model.predict_proba(X_test, **own)[:, 1]
        losses[method] = [
            float(log_loss(y_test[h_test == one], p[h_test == one], labels=[0, 1]))
            for one in "ABCDE"
        ]

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for place, (method, values) in enumerate(losses.items()):
            look = look_of(method)
            xs = np.arange(5) + (place - 1) * 0.16
            colour = look.colour(theme)
            axes.vlines(xs, 0, values, color=colour, lw=1.5, alpha=0.5)
            axes.plot(
                xs, values, look.marker, color=colour, ms=9, label=NAMES[method], clip_on=False
            )
        counts = [int((h == one).sum()) for one in "ABCDE"]
        names = [f"hospital {one}\n{n} patients" for one, n in zip("ABCDE", counts, strict=True)]
        axes.set_xticks(range(5), names)
        axes.tick_params(axis="x", length=0, colors=theme.ink)
        axes.set(ylabel="log loss on test patients", ylim=(0, None))
        axes.grid(axis="x", visible=False)
        axes.legend(frameon=False, ncols=3, loc="upper right")

    save("clients", 3.2, draw)
    note("clients", {n: [round(v, 3) for v in values] for n, values in losses.items()})


# Diagrams: boxes, arrows and words as SVG, without a run.


class Sketch:
    """A diagram of 700 pixels' width."""

    def __init__(self, height: int, theme: Theme, title: str) -> None:
        self.height, self.theme, self.title = height, theme, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, hue: int | None = None) -> None:
        """A rectangle, tinted where it has a hue."""
        line = self.theme.faint if hue is None else self.theme.hues[hue]
        fill = mixed(line, self.theme.paper, 0.1)
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" '
            f'stroke="{line}" stroke-width="1.5"/>'
        )

    def text(self, x: float, y: float, words: str, *, bold: bool = False, size: int = 14) -> None:
        """Words around a place, a line for each that they have."""
        for row, line in enumerate(words.split("\n")):
            self.parts.append(
                f'<text x="{x}" y="{y + row * size * 1.35:g}" font-size="{size}" '
                f'font-weight="{600 if bold else 400}">{line}</text>'
            )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, hue: int) -> None:
        """A straight arrow."""
        colour = self.theme.hues[hue]
        self.parts.append(
            f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{colour}" stroke-width="2" fill="none" '
            f'marker-end="url(#tip{hue})"/>'
        )

    def dot(self, x: float, y: float, hue: int, number: int) -> None:
        """A step's number in a circle."""
        self.parts.append(
            f'<circle cx="{x}" cy="{y}" r="13" fill="{self.theme.hues[hue]}"/>'
            f'<text x="{x}" y="{y + 5}" font-size="14" font-weight="700" '
            f'style="fill:{self.theme.paper}">{number}</text>'
        )

    def svg(self) -> str:
        """The file's text."""
        tips = "".join(
            f'<marker id="tip{hue}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" '
            f'markerHeight="6" orient="auto"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
            for hue, colour in enumerate(self.theme.hues)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {self.height}" '
            f'width="700" height="{self.height}" role="img"><title>{self.title}</title>'
            f"<style>text{{font-family:system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
            f"fill:{self.theme.ink};text-anchor:middle}}</style><defs>{tips}</defs>"
            f'<rect width="700" height="{self.height}" fill="{self.theme.paper}"/>'
            + "\n".join(self.parts)
            + "</svg>\n"
        )


def four_steps(theme: Theme) -> str:
    """A round: broadcast, local inference, report, update."""
    sketch = Sketch(372, theme, "A round in four steps")
    sketch.box(150, 16, 400, 96, BLUE)
    sketch.text(350, 42, "Server", bold=True, size=16)
    sketch.text(350, 64, "keeps the prior of the clients' weights")
    sketch.dot(222, 90, BLUE, 4)
    sketch.text(364, 95, "combines the updates: a new prior")
    for place, name in enumerate("ABC"):
        x = 16 + 234 * place
        sketch.box(x, 252, 200, 104, GREEN)
        sketch.text(x + 100, 278, f"Client {name}", bold=True, size=16)
        sketch.dot(x + 34, 273, GREEN, 2)
        sketch.text(x + 100, 310, "infers its weights from\nits data and the prior")
        end = (x + 100 - 350) * 0.45 + 350
        sketch.arrow(end - 12, 114, x + 84, 248, BLUE)
        sketch.arrow(x + 116, 250, end + 12, 116, ORANGE)
    sketch.dot(64, 152, BLUE, 1)
    sketch.text(64, 186, "sends the prior\n(bytes down)", size=13)
    sketch.dot(636, 152, ORANGE, 3)
    sketch.text(636, 186, "sends an update\n(bytes up)", size=13)
    return sketch.svg()


def deployment(theme: Theme) -> str:
    """What travels between three hospitals and a server."""
    sketch = Sketch(388, theme, "What travels in a deployed federation")
    sketch.box(200, 14, 300, 90, BLUE)
    sketch.text(350, 40, "Server (Flower SuperLink)", bold=True, size=16)
    sketch.text(350, 62, "combines updates, writes the run folder,\nsees no row of any hospital")
    for place, name in enumerate(("North", "South", "West")):
        x = 16 + 234 * place
        sketch.box(x, 238, 200, 108, GREEN)
        sketch.text(x + 100, 264, f"Hospital {name}", bold=True, size=16)
        sketch.text(x + 100, 286, "SuperNode, own key", size=13)
        sketch.box(x + 30, 300, 140, 34)
        sketch.text(x + 100, 322, "patients stay here", size=13)
        end = (x + 100 - 350) * 0.5 + 350
        sketch.arrow(end - 12, 106, x + 84, 234, BLUE)
        sketch.arrow(x + 116, 236, end + 12, 108, ORANGE)
    sketch.text(74, 132, "down: model,\nsettings", bold=True, size=13)
    sketch.text(626, 132, "up: update,\ncounts, metrics", bold=True, size=13)
    sketch.text(350, 374, "Connections use TLS. Secure sums and noise are options.", size=13)
    return sketch.svg()


DIAGRAMS = {"four-steps": four_steps, "deployment": deployment}
PICTURES: dict[str, Callable[[Path], None]] = {
    "report": report,
    "fusion": fusion,
    "landscape": landscape,
    "calibration": calibration,
    "clients": clients,
    "frameworks": frameworks,
}


def main() -> None:
    """Draw the pictures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = [*DIAGRAMS, *PICTURES]
    parser.add_argument("names", nargs="*", help=f"of the pictures: {', '.join(known)}")
    parser.add_argument("--runs", type=Path, default=Path("build/pictures"), help="folder for runs")
    given = parser.parse_args()
    if unknown := set(given.names) - set(known):
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in given.names or known:
        if name in DIAGRAMS:
            for word, theme in THEMES.items():
                (HERE / f"{name}-{word}.svg").write_text(DIAGRAMS[name](theme))
        else:
            given.runs.mkdir(parents=True, exist_ok=True)
            PICTURES[name](given.runs)


if __name__ == "__main__":
    main()
