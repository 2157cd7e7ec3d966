"""Models that predict: of run folders and of files, one or several together."""

from pathlib import Path

from fedbayes.errors import ModelError, RunError, warn
from fedbayes.reports.result import StoredRun
from fedbayes.runs.trained import Member, TrainedModel, together
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.serve.evaluation_set import find_training, of_card
from fedbayes.workflows.serve.model_evaluation import open_model


def load(
    *paths: Path | str,
    client: str | int | None = None,
    site: str | int | None = None,
    conformal: bool = True,
    temperature: bool = True,
    trusted: frozenset[str] = frozenset(),
    adapt: Path | str | None = None,
) -> TrainedModel:
    """Load a model for predictions, from a run folder or a model file.

    Args:
        *paths: run folders, files of weights or `.pt2` programs with a card, as `fedbayes export`
            writes them. Several predict together: the mean of their predictive distributions.
        client: name or index of a client, for its own model instead of the global one.
        site: name or index of the client of whose rows the conformal threshold is to be.
        conformal: whether sets and intervals are conformal, where a single model was calibrated by
            `fedbayes calibrate --method conformal`; several models together have no threshold.
        temperature: whether probabilities are at the temperature of a single run or file, where it
            has one; several together have none.
        trusted: what may be imported if a model file names it, as `package.module:name`.
        adapt: file with labeled rows of a client that took no part; the model of the run, whose
            method has personal models, is adapted to them.

    Raises:
        FedbayesError: a model cannot be read, does not describe its inputs, or has another target
            than the first one.

    Examples:
        >>> import fedbayes
        >>> run = fedbayes.run(data="digits", rounds=1)
        >>> len(fedbayes.load(run.folder).classes_)
        10
    """
    if not paths:
        raise ModelError("there is no model to load. Give a run folder or a model file")
    if len({str(path) for path in paths}) < len(paths):
        raise ModelError("a model is given twice. Give each model once")
    if site is not None and len(paths) > 1:
        raise RunError("--site works only with one run, not with several models")
    if adapt is not None:
        if client is not None or site is not None:
            raise RunError("--adapt works only with a new client. Leave out --client and --site")
        if len(paths) > 1 or not Path(paths[0]).is_dir():
            raise RunError("--adapt needs one run folder, because it trains as its clients did")
        return _adapted(Path(paths[0]), Path(adapt), temperature)
    if len(paths) > 1:
        conformal = temperature = False
    return together(
        [_one(Path(path), client, site, conformal, temperature, trusted) for path in paths]
    )


def _adapted(run: Path, rows: Path, temperature: bool) -> TrainedModel:
    """The model of a run, adapted to rows of a new client."""
    RunFolder(run).require_run()
    found = find_training(run, rows, ())
    return StoredRun(run).trained(temperature=temperature, adapt=found.samples)


def _one(
    path: Path,
    client: str | int | None,
    site: str | int | None,
    conformal: bool,
    temperature: bool,
    trusted: frozenset[str],
) -> TrainedModel:
    if path.is_dir():
        RunFolder(path).require_run()
        return StoredRun(path).trained(
            client, site=site, conformal=conformal, temperature=temperature
        )
    if not path.exists():
        raise ModelError(f"run folder or model file not found: {path}")
    if client is not None or site is not None:
        option = "client" if site is None else "site"
        raise RunError(
            f"--{option} chooses a client of a run folder, but {path} is a single model. Leave it "
            "out"
        )
    tests, card = of_card(path, trusted)
    found = open_model(path, tests)
    threshold = card.conformal if conformal else None
    if threshold is not None and found.means and threshold.score == "quantile":
        warn(
            f"{path} gives only means, so its conformal threshold for quantiles has no effect. "
            "Run fedbayes calibrate --method conformal --score residual"
        )
        threshold = None
    members = (Member(found.draw, found.preprocessing, card.reading),)
    return TrainedModel(
        members,
        found.likelihood,
        str(path),
        found.means,
        threshold,
        card.hazards,
        temperature=found.temperature if temperature else None,
    )
