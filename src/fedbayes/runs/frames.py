"""What a run's lines tell, as pandas DataFrames."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbayes.runs.lines import troubles_of
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.metrics_file import Metrics

if TYPE_CHECKING:
    import pandas as pd

WHOSE = ("refused", "lost", "troubles", "outliers")
"""Entries of a line that list clients with errors: their number is reported."""
OF_CLIENTS = ("by_client", "undefined")
"""Entries of a line that are metrics of each client: `clients_frame` has them."""


def rounds_frame(lines: Iterable[Metrics], classes: Sequence[str] = ()) -> "pd.DataFrame":
    """The metrics of rounds.

    Args:
        lines: of `metrics.jsonl`.
        classes: names of the classes, for the columns of their accuracies.

    Returns:
        A row for each round, by its number; a column for each metric, such as `global_accuracy`,
        `class_accuracy/NAME`, `loss`, `bytes_up`; missing where a round does not tell it. Of
        `refused`, `lost`, `troubles` and `outliers` it is the number of clients.
    """
    import pandas as pd

    frame = pd.DataFrame([_row(line, classes) for line in lines])
    return frame.set_index("round") if len(frame) else frame


def _row(line: Metrics, classes: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in flat(line).items():
        if name in OF_CLIENTS:
            continue
        if name in WHOSE:
            row[name] = len(value)
        elif name == "class_accuracy":
            shares = value or ()
            names = classes if len(classes) == len(shares) else range(len(shares))
            row |= {f"{name}/{which}": one for which, one in zip(names, shares, strict=True)}
        elif isinstance(value, Mapping):
            row |= dict(_leaves(name, value))
        else:
            row[name] = value
    return row


def _leaves(name: str, table: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Entries of nested tables, as in `privacy/clip/all`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{name}/{key}", value)
        else:
            yield f"{name}/{key}", value


def clients_frame(
    names: Sequence[str],
    sizes: Mapping[str, Sequence[int | None]],
    metrics: Mapping[str, Mapping[str, Mapping[str, float | None]]],
    lines: Sequence[Metrics],
) -> "pd.DataFrame":
    """What is known of single clients.

    Args:
        names: of the clients [S].
        sizes: numbers of each client [S], by the name of the column.
        metrics: by model, `global` or `local`, client and name, as `per_client` of a summary.
        lines: of `metrics.jsonl`.

    Returns:
        A row for each client, by name: numbers of samples, metrics of the models on its own test
        samples (missing where there are none), as in `global_rmse`, and the number of rounds in
        which its report was rejected or lost.
    """
    import pandas as pd

    frame = pd.DataFrame(dict(sizes), index=pd.Index(names, name="client"))
    for whose, each in metrics.items():
        told = pd.DataFrame.from_dict(dict(each), orient="index", dtype=float)
        frame = frame.join(told.add_prefix(f"{whose}_"))
    for kind in ("refused", "lost"):
        counts = [0] * len(names)
        for entry in troubles_of(list(lines), kind):
            counts[entry["client"]] += 1
        frame[kind] = counts
    return frame


def troubles_frame(names: Sequence[str], lines: Sequence[Metrics]) -> "pd.DataFrame":
    """What went wrong with whom and when.

    Args:
        names: of the clients [S].
        lines: of `metrics.jsonl`.

    Returns:
        A row for each report that was rejected or lost, came after trouble, or was unlike the
        others: `round`, `client`, `what` and `reason`. Without rows if all went well.
    """
    import pandas as pd

    rows = [
        (entry["round"], names[entry["client"]], kind, entry["reason"])
        for kind in WHOSE
        for entry in troubles_of(list(lines), kind)
    ]
    return pd.DataFrame(sorted(rows), columns=["round", "client", "what", "reason"])
