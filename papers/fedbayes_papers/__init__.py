"""The experiments of the papers, each by one command.

This is a distribution of its own, which the extra `fedbayes[papers]` installs; `fedbayes reproduce`
finds it by entry point. An experiment is an `Experiment` in the file of its paper. It may name
methods, as the package never does but for their colours. Its settings are those of a paper: change
one only with the page and figure that say so, and measure again what it touches (`docs/findings`).
"""

from collections.abc import Sequence
from pathlib import Path

from fedbayes.core.files import writable_folder
from fedbayes.data import DataSettings, catalogue, load_dataset
from fedbayes.errors import ConfigError, DataError
from fedbayes_papers.combined import EXPERIMENTS as COMBINED
from fedbayes_papers.combined_hosts import EXPERIMENTS as COMBINED_HOSTS
from fedbayes_papers.em_view import EXPERIMENTS as EM_VIEW
from fedbayes_papers.experiment import Experiment, Request, Watch
from fedbayes_papers.finding import FILE, Finding, Line, Scale, read_finding
from fedbayes_papers.gates import EXPERIMENTS as GATES
from fedbayes_papers.gpi_fnm import EXPERIMENTS as GPI_FNM
from fedbayes_papers.virtual import EXPERIMENTS as VIRTUAL
from fedbayes_papers.weight_gates import EXPERIMENTS as WEIGHT_GATES

__all__ = ["EXPERIMENTS", "Experiment", "Finding", "Scale", "lines", "reproduce"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *GPI_FNM,
        *VIRTUAL,
        *EM_VIEW,
        *WEIGHT_GATES,
        *GATES,
        *COMBINED,
        *COMBINED_HOSTS,
    )
}
"""Every experiment by its name."""


def reproduce(
    name: str,
    folder: Path,
    *,
    scale: Scale = "small",
    datasets: Sequence[str] | None = None,
    seeds: int | None = None,
    watch: Watch = lambda _: None,
) -> Finding:
    """Measure a table or a figure of a paper; what was measured before is not measured again.

    Args:
        name: of the experiment.
        folder: where `NAME/results.jsonl`, `NAME/finding.json`, `NAME/table.md`,
            `NAME/figure.png` and the trained models go. Experiments in one folder share these
            models.
        scale: `small` takes minutes to some hours on two cores, `paper` is as there.
        datasets: some of its data sets, or `digits`; by default those that are here.
        seeds: how many; by default as many as the experiment takes at this scale. A verdict
            takes three.
        watch: called with what is being done.

    Returns:
        Tables, claims and a verdict; `str` of it is Markdown. What the folder has of other data
        sets, measured at this scale before, is part of it.

    Raises:
        ConfigError: there is no such experiment, or it does not use such data, or no seed.
        DataError: a data set is absent.
        RunError: what the folder has of it is damaged, or it cannot be written.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment is called {name!r}; there are {', '.join(EXPERIMENTS)}")
    if seeds is not None and seeds < 1:
        raise ConfigError(f"an experiment takes one seed at least, not {seeds}")
    experiment = EXPERIMENTS[name]
    writable_folder(folder / name, "the folder for results")
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
    request = Request(name, folder, scale, here, seeds, watch)
    before = read_finding(request.out / FILE)
    finding = experiment.run(request).beside(before)
    finding.write(request.out)
    return finding


def lines(folder: Path) -> list[Line]:
    """Every experiment in the order of the papers, with what it came to in this folder.

    Raises:
        RunError: a finding is damaged.
    """
    present = {entry.name for entry in catalogue() if entry.available}
    return [
        Line(
            experiment.name,
            experiment.what,
            experiment.datasets,
            read_finding(folder / experiment.name / FILE),
            tuple(name for name in experiment.datasets if name not in present),
        )
        for experiment in EXPERIMENTS.values()
    ]
