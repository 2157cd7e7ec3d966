"""Runs from Python: `fedbayes.run`, `fedbayes.resume`, and the result with the commands' verbs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbayes.config.config import Config
from fedbayes.console.display import console_for
from fedbayes.errors import ConfigError
from fedbayes.reports.result import StoredRun
from fedbayes.runs.simulation import Simulation
from fedbayes.start import Listener, drive, either
from fedbayes.storage.activity import Notify
from fedbayes.storage.folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd

    from fedbayes.workflows.serve.export import Export


class Result(StoredRun):
    """A run that has ended: its metrics, predictions, and the verbs of the command line.

    Args:
        folder: the run folder.

    Raises:
        RunError: the folder holds no run.

    Examples:
        >>> import fedbayes
        >>> from sklearn.datasets import load_digits
        >>> run = fedbayes.run(data="digits", rounds=1)
        >>> run.predict(load_digits().images[:3, None]).shape
        (3,)
        >>> run.evaluate().columns[0]
        'accuracy'
    """

    def evaluate(
        self, data: Any = None, *, metrics: Sequence[str] | str = ("auto",), **settings: Any
    ) -> "pd.DataFrame":
        """Measure the global model on test data, as `fedbayes evaluate` does.

        Args:
            data: the name of a data set, or a table file with new rows; None: the clients' test
                samples.
            metrics: names of metrics in addition to those of the likelihood; `auto`: those that
                suit it.
            **settings: settings of the data, as keyword arguments: `label="outcome"`.

        Returns:
            One row for the model; with the clients' test samples also one for each client.

        Raises:
            FedbayesError: the data cannot be read or do not fit the model.

        Examples:
            >>> import fedbayes
            >>> run = fedbayes.run(data="digits", clients=4, rounds=1)
            >>> run.evaluate().index.tolist()
            ['all', 'client-0', 'client-1', 'client-2', 'client-3']
        """
        import json

        import pandas as pd

        from fedbayes.workflows.serve.evaluation_set import find_tests
        from fedbayes.workflows.serve.model_evaluation import compare, open_models

        given = [f"data.{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
        if data is not None:
            is_file = isinstance(data, Path) or Path(str(data)).exists()
            given.insert(0, f"data.{'path' if is_file else 'name'}={json.dumps(str(data))}")
        model = self.folder.model_file
        tests = find_tests(model, self.folder.path, given)
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        (score,) = compare(open_models([model], tests, None), tests, metrics=names)
        rows = {"all": score.metrics, **score.clients}
        return pd.DataFrame.from_dict(rows, orient="index")

    def export(
        self, out: Path | str, *, compact: bool = False, client: str | int | None = None
    ) -> "Export":
        """Write the global model, or a client's own, as `fedbayes export` does.

        Args:
            out: the file: `.safetensors` or `.pt` for weights; `.pt2` or `.onnx` for a program
                that takes raw samples.
            compact: remove units that are all zero.
            client: name or index of a client, for its own network.

        Raises:
            RunError: the run has no such model, or the file cannot be written.

        Examples:
            >>> import fedbayes, tempfile, pathlib
            >>> run = fedbayes.run(data="digits", rounds=1)
            >>> done = run.export(pathlib.Path(tempfile.mkdtemp()) / "model.safetensors")
            >>> done.path.exists()
            True
        """
        from fedbayes.workflows.serve.export import export

        return export(self.folder.path, Path(out), small=compact, client=client)

    def calibrate(self, method: str = "auto", *, personal: bool = False, **options: Any) -> Any:
        """Calibrate the predictions, as `fedbayes calibrate --method` does.

        `predict`, `predict_proba` and `predict_interval` use the calibration from then on.

        Args:
            method: `temperature` (probabilities), `conformal` (prediction sets and intervals) or
                `hazards` (survival); `auto`: temperature for classes and labels, hazards for
                survival, else conformal.
            personal: calibrate each client's own model instead of the global one.
            **options: of the method: `share`; `level`, `score`, `per_client`; `rows`, `coarsen`.

        Returns:
            The calibration with its quality on rows that it was not computed from.

        Raises:
            ConfigError: there is no such method, or it does not suit the likelihood.
            RunError: the run has not ended, or there are too few rows.

        Examples:
            >>> import fedbayes
            >>> run = fedbayes.run(data="digits", rounds=1)
            >>> run.calibrate("conformal", level=0.8).level
            0.8
        """
        if method == "auto":
            kind = self.preprocessing.target.kind
            suits = {"class": "temperature", "labels": "temperature", "survival": "hazards"}
            method = suits.get(kind, "conformal")
        if method == "temperature":
            from fedbayes.workflows.calibrate.temperature import calibrate_temperature

            return calibrate_temperature(self.folder.path, personal=personal, **options)
        if method == "conformal":
            from fedbayes.workflows.calibrate.conformal import calibrate_conformal

            return calibrate_conformal(self.folder.path, personal=personal, **options)
        if method == "hazards":
            from fedbayes.workflows.calibrate.hazards import estimate_hazards

            return estimate_hazards(self.folder.path, personal=personal, **options)
        raise ConfigError(f"method is {method!r}. Choose auto, temperature, conformal or hazards")

    def report(self, out: Path | str = "report.html", *others: "StoredRun | Path | str") -> Path:
        """Write an HTML report of this run, or a comparison with others, as `fedbayes report` does.

        Args:
            out: the file to write; it needs no network.
            *others: runs to compare with, or their folders.

        Returns:
            The file.

        Raises:
            RunError: a folder holds no run, or the file cannot be written.

        Examples:
            >>> import fedbayes, tempfile, pathlib
            >>> run = fedbayes.run(data="digits", rounds=1)
            >>> run.report(pathlib.Path(tempfile.mkdtemp()) / "report.html").exists()
            True
        """
        from fedbayes.errors import warn
        from fedbayes.reports import write_page

        folders = [o.folder.path if isinstance(o, StoredRun) else Path(o) for o in others]
        for note in write_page([self.folder.path, *folders], Path(out)):
            warn(note)
        return Path(out)


def run(
    config: Config | Path | str | None = None,
    folder: Path | str | None = None,
    *,
    out: Path | str | None = None,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train a federation and return its result.

    Args:
        config: the settings, or the TOML file that has them; or give them as keyword arguments.
        folder: the run folder, which must not hold a run; a temporary one if None.
        out: the same by the name that it has on the command line.
        listener: is called after every round with the simulation and the round.
        track: names of trackers that log the rounds; see `fedbayes.runs.tracking`.
        progress: whether the rounds are shown as they go; None: in IPython and in notebooks alone.
        **settings: keys of the config, where there is no `config`; tables are dicts. A name may
            stand for a table (`method="fedprox"`, `data="mine.csv"`), and so may a Python object:
            a class or instance of a method, a `torch.nn.Module` or its class as the model, a
            DataFrame as the data. Keys of a table that options of the command line set have these
            names too: `clients`, `partition`, `alpha`, `label`, `group`, `lr`, `epochs`,
            `batch_size`, `optimizer`, `likelihood` and `device`.

    Raises:
        FedbayesError: a setting, the data or the network is invalid, or no round had an update.

    Examples:
        >>> import fedbayes
        >>> run = fedbayes.run(method="fedprox", data="digits", rounds=2, lr=0.05)
        >>> run.summary["rounds"], run.summary["method"]
        (2, 'fedprox')
    """
    from fedbayes.runs.tracking import check

    place = either(folder=folder, out=out)
    check(track)
    settled = Config.given(config, settings)
    return complete(
        lambda notify: Simulation(settled, place, notify=notify), listener, track, progress
    )


def resume(
    folder: Path | str,
    *,
    rounds: int | None = None,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **objects: Any,
) -> Result:
    """Resume a run from its last complete round; the result equals that of an unbroken run.

    Args:
        folder: the run folder.
        rounds: how many rounds the run is to have in all, also after it has ended; None: as before.
        listener: as for `run`.
        track: as for `run`.
        progress: as for `run`.
        **objects: the Python objects that `run` was given and no module has, by the same names:
            `model=net` for a network that was built already, `method=Mine` for a class of a
            notebook. Settings stay as they were.

    Raises:
        FedbayesError: the folder holds no run, an object is missing, or as for `run`.

    Examples:
        >>> import fedbayes
        >>> run = fedbayes.run(data="digits", rounds=1)
        >>> fedbayes.resume(run.folder, rounds=2).summary["rounds"]
        2
    """
    RunFolder(Path(folder)).give_objects(objects)
    return complete(
        lambda notify: Simulation(None, folder, notify=notify, rounds=rounds),
        listener,
        track,
        progress,
    )


def complete(
    start: Callable[[Notify], Simulation],
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    title: str = "",
) -> Result:
    """Run a simulation to its end and return its result.

    Args:
        start: makes the simulation.
        listener: as for `run`.
        track: as for `run`.
        progress: as for `run`.
        title: what is shown before the method's name.
    """
    simulation = drive(start, console_for(progress), listener=listener, track=track, title=title)
    return Result(simulation.folder.path, simulation.temporary)
