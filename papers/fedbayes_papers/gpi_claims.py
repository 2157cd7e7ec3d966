"""What the GPI-FNM paper's experiments come to: tables, figures, claims and their causes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedbayes.reports.palette import looks
from fedbayes_papers.experiment import Request, mean_and_std
from fedbayes_papers.finding import Claim, Finding, Part, markdown
from fedbayes_papers.gpi_networks import FUNCTION_SPACE, NO_COUNTS, PARTITIONS, WIDTH

KINDS = {
    "GPI-FNM": ("gpi-fnm", "-"),
    "PFNM": ("pfnm", "--"),
    "FedAvg": ("fedavg", "-."),
    "locals": ("local", ":"),
    "ensemble": ("ensemble", ":"),
    "average": ("average", ":"),
    FUNCTION_SPACE: ("function", "-"),
    NO_COUNTS: ("function", "--"),
    "GPI-FNM, alternating": ("gpi-fnm", "-"),
    "GPI-FNM, alternating, small": ("gpi-fnm", "-"),
}
"""By which method each has its colour, and its line."""
LOOKS = dict(zip(KINDS, looks([method for method, _ in KINDS.values()]), strict=True))
TOP_DOWN = (
    "matched from the top down, a layer is matched by its outgoing weights before what flows "
    "into it is known; alternating over the layers mends it"
)
"""Why deep networks fall behind their parts."""
AT_CHANCE = "the deepest networks are at chance however they are matched from the top down"
"""Why GPI-FNM is not ahead of PFNM everywhere."""
STAYS = (
    "the many weights of a neuron stay near its random start, so that neurons trained apart find "
    "no partners like them"
)
"""Why matched networks fall to their parts with many clients on CIFAR-10."""
ONE_START = f"{STAYS}; FedAvg's clients have one start"
"""Why they fall behind FedAvg there."""
APART = (
    f"{STAYS}, and with every layer less of the clients' functions is left, alternating or not; "
    "FedAvg's clients have one start"
)
"""Why deep ones fall behind everything there."""
NO_DATA = (
    "settings of GPI-FNM are chosen on held-out samples, those of the alternating sweep see no "
    "data and are the same for all"
)
"""Why alternating is not ahead in one round."""
Claims = Callable[[pd.DataFrame], Sequence[Claim]]
"""Claims of the paper on the measurements of one data set."""


def panels(
    table: pd.DataFrame, x: str, label: str, path: Path, title: str, value: str = "accuracy"
) -> None:
    """A panel for each data set and partition: mean over seeds of each method, with deviations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    kinds = list(dict.fromkeys(zip(table["dataset"], table["partition"], strict=True)))
    figure = Figure(figsize=(4.2 * len(kinds), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, (dataset, partition) in zip(grid, kinds, strict=True):
        chosen = table[(table["dataset"] == dataset) & (table["partition"] == partition)]
        for method, own in chosen.groupby("method", sort=False):
            look, line = LOOKS[str(method)], KINDS[str(method)][1]
            stats = own.groupby(x)[value].agg(["mean", "std"]).fillna(0.0)
            axes.errorbar(
                stats.index,
                stats["mean"],
                yerr=stats["std"],
                label=str(method),
                color=look.colour(),
                marker=look.marker,
                linestyle=line,
                capsize=2,
                markersize=5,
            )
        axes.set_title(f"{dataset}, {PARTITIONS[partition]}")
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("test accuracy")
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def summarize(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """A line for each combination of `by`, accuracies and sizes of the methods in columns."""
    lines = []
    for key, group in table.groupby(list(by), sort=False):
        line = dict(zip(by, key, strict=True))
        for method, own in group.groupby("method", sort=False):
            text = mean_and_std(own["accuracy"].tolist())
            sizes = [max(sizes) for sizes in own.get("sizes", []) if isinstance(sizes, list)]
            line[str(method)] = f"{text} ({np.mean(sizes):.0f})" if sizes else text
        lines.append(line)
    return pd.DataFrame(lines).fillna("–")


def ahead(
    table: pd.DataFrame, by: Sequence[str], better: str, worse: str, cause: str = ""
) -> Claim:
    """Whether one method's mean is above another's in every setting; why not, if that is known."""
    means = table.groupby([*by, "method"])["accuracy"].mean().unstack()
    gain = (means[better] - means[worse]).dropna()
    return Claim(
        text=f"{better} is ahead of {worse} in every setting",
        seen=bool((gain > 0).all()),
        measured=f"in {int((gain > 0).sum())} of {len(gain)}, by {gain.min():+.3f} to "
        f"{gain.max():+.3f}, mean {gain.mean():+.3f}",
        cause=cause,
    )


def finding_of(
    request: Request,
    table: pd.DataFrame,
    by: Sequence[str],
    claims: Claims,
    note: Callable[[pd.DataFrame], str] = lambda _: "",
) -> Finding:
    """What was measured as a finding: a table of `by` and the claims of each data set."""
    parts = []
    for dataset, own in table.groupby("dataset", sort=False):
        parts.append(
            Part(
                table=markdown(summarize(own, by)),
                claims=tuple(claims(own)),
                dataset=str(dataset),
                note=note(own),
            )
        )
    seeds = table.groupby([*by, "method"])["seed"].nunique().min()
    general = (
        "Mean ± std over seeds; in parentheses the mean size of the largest layer. The paper "
        "shows curves alone."
    )
    return request.found(parts, int(seeds), general)


def neurons_of(table: pd.DataFrame, method: str) -> float:
    """Size of a method's largest layer, mean over what was measured."""
    return float(table[table["method"] == method]["sizes"].map(max).mean())


def choices_of_kl(table: pd.DataFrame) -> str:
    """How often GPI-FNM chose to be PFNM, and what the KL term brought where it did not."""
    by = ["dataset", "partition", "clients", "seed"]
    ours, theirs = (table[table["method"] == name].set_index(by) for name in ("GPI-FNM", "PFNM"))
    without = ours["chosen"].map(lambda chosen: chosen["epsilon"] == 0)
    gain = (ours["accuracy"] - theirs["accuracy"])[~without]
    text = (
        "without its KL term (ε = 0) GPI-FNM is PFNM, and that is what the samples that settings "
        f"are chosen on prefer in {int(without.sum())} of {len(without)} federations"
    )
    return (
        f"{text}; in the others it is ahead by {gain.mean():.4f} on average" if len(gain) else text
    )


def one_network(table: pd.DataFrame) -> str:
    """What alternating has in place of the ensemble."""
    neurons = neurons_of(table, "GPI-FNM, alternating")
    return f"it is one network, of {neurons:.0f} neurons in its largest layer for ten times {WIDTH}"


def fewer_neurons(table: pd.DataFrame) -> str:
    """What GPI-FNM has that fusion in function space has not."""
    neurons = neurons_of(table, "GPI-FNM")
    if neurons <= WIDTH:
        return ""
    return (
        f"GPI-FNM has {neurons:.0f} neurons in the mean and settings that are chosen on held-out "
        f"samples; in function space there are {WIDTH}, and no data"
    )


def more_neurons(found: pd.DataFrame) -> str:
    """What the KL term brings where both methods have the same search: neurons."""
    last = found[found["round"] == found["round"].max()]
    ours, theirs = (neurons_of(last, method) for method in ("GPI-FNM", "PFNM"))
    if theirs <= ours:
        return ""
    return (
        "chosen by the same search PFNM is as good where it has neurons enough: its largest layer "
        f"has {theirs:.0f} in the last round, GPI-FNM's {ours:.0f}"
    )
