"""The experiments of the papers, each by one command."""

from collections.abc import Sequence
from pathlib import Path

from fedbayes.data import DataSettings, load_dataset
from fedbayes.errors import ConfigError, DataError
from fedbayes.papers.combined import EXPERIMENTS as COMBINED
from fedbayes.papers.em_view import EXPERIMENTS as EM_VIEW
from fedbayes.papers.experiment import Experiment, Scale, Watch
from fedbayes.papers.gpi_fnm import EXPERIMENTS as GPI_FNM
from fedbayes.papers.virtual import EXPERIMENTS as VIRTUAL

__all__ = ["EXPERIMENTS", "Experiment", "Scale", "reproduce"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (*GPI_FNM, *VIRTUAL, *EM_VIEW, *COMBINED)
}
"""Every experiment by its name."""


def reproduce(
    name: str,
    folder: Path,
    *,
    scale: Scale = "small",
    datasets: Sequence[str] | None = None,
    watch: Watch = lambda _: None,
) -> str:
    """Measure a table or a figure of a paper; what was measured before is not measured again.

    Args:
        name: of the experiment.
        folder: where `NAME/results.jsonl`, `NAME/table.md`, `NAME/figure.png` and the trained
            models go. Experiments in one folder share these models.
        scale: `small` takes minutes to some hours on two cores, `paper` is as there.
        datasets: some of its data sets, or `digits`; by default those that are here.
        watch: called with what is being done.

    Returns:
        The table as Markdown.

    Raises:
        ConfigError: there is no such experiment, or it does not use such data.
        DataError: a data set is absent.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment is called {name!r}; there are {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name]
    here, absent = [], []
    for dataset in datasets or experiment.datasets:
        possible = (*experiment.datasets, "digits")
        if dataset not in possible:
            raise ConfigError(f"{name} is on {', '.join(possible)}, not on {dataset!r}")
        try:
            load_dataset(DataSettings(name=dataset))
        except DataError as error:
            if datasets:
                raise
            absent.append(str(error))
        else:
            here.append(dataset)
    if not here:
        raise DataError("\n".join(absent))
    for reason in absent:
        watch(f"left out: {reason}")
    return experiment.run(folder, scale, here, watch)
