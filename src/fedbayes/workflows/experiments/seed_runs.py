"""One config under several seeds: a run folder for each, and what they have in common.

    seeds.toml     the settings that all share, and their seeds
    seed-0/, …     the run folders
    seeds.json     mean and standard deviation of their metrics

Runs that have ended are not run again. So the same call resumes after an interruption, and a call
with more seeds, or more rounds, adds to what is there.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import tomli_w

from fedbayes.config.config import Config
from fedbayes.config.former import renewed
from fedbayes.core.brief import Brief, grid, table, told
from fedbayes.core.files import SEEDS_FILE, json_text, parse_toml, read_text, write_beside
from fedbayes.core.lazy import in_memory
from fedbayes.errors import ConfigError, FedbayesError, RunError
from fedbayes.runs.simulation import Simulation
from fedbayes.runs.tracking import check
from fedbayes.start import Listener, either
from fedbayes.storage.activity import Notify, unnoticed
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.formatting import number, words
from fedbayes.storage.inventory import FREE, Inventory, is_free
from fedbayes.storage.metrics_file import Metrics
from fedbayes.workflows.running import Result, complete

if TYPE_CHECKING:
    import pandas as pd

COSTS = ("rounds", "bytes_down", "bytes_up", "seconds")
"""Entries of a summary, besides its metrics, that have mean and standard deviation."""

_FREE = set(FREE) - {
    "stop_after",
    "stop_min_improvement",
    "evaluate_every",
    "evaluate_local_every",
    "keep_checkpoints",
}
"""Settings that runs which enter one mean need not share while they are run; rounds grow only."""


class SeedRuns(Brief):
    """The runs of one config under several seeds, in one folder.

    Args:
        config: the settings; its own seed does not count.
        seeds: how many, from the config's seed on, or which.
        folder: where the run folders are; a temporary one if None.

    Raises:
        ConfigError: the seeds are invalid: there are none, one is no integer or is named twice.
        RunError: the folder holds something else.

    Examples:
        >>> import fedbayes
        >>> runs = fedbayes.SeedRuns(fedbayes.Config.create(rounds=1), seeds=[0, 3])
        >>> runs.seeds
        [0, 3]
    """

    def __init__(
        self, config: Config, seeds: int | Sequence[int], folder: Path | str | None = None
    ) -> None:
        self.seeds = _numbers(seeds, config.seed)
        """Seeds of the runs, in their order."""
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedbayes-")
            folder = self._temporary.name
        self.folder = Path(folder)
        """Where the run folders are."""
        self.configs = {seed: _with_seed(config, seed) for seed in self.seeds}
        """Settings of the runs, by seed."""
        if RunFolder(self.folder).config_file.exists():
            raise RunError(f"{self.folder} already has a single run. Choose another folder")
        if (self.folder / SEEDS_FILE).exists():
            before = Config.create(**_read(self.folder)[0])
            _refuse_others(self.folder, "runs", _with_seed(before, config.seed), config)

    def _shows(self) -> dict[str, object]:
        config = self.configs[self.seeds[0]]
        return {"method": config.method["name"], "seeds": self.seeds, "folder": self.folder}

    def _repr_html_(self) -> str:
        """What a notebook shows: means and standard deviations, once all runs have ended."""
        if self.missing:
            return table("SeedRuns", {name: told(value) for name, value in self._shows().items()})
        found = self.summary
        rows = [
            [words(name), *("–" if v is None else number(v) for v in (one["mean"], one["std"]))]
            for name, one in found["metrics"].items()
        ]
        head = f"{found['method']} on {found['dataset']}, {len(self.seeds)} seeds"
        return grid(head, [["", "mean", "standard deviation"], *rows])

    @classmethod
    def stored(cls, folder: Path | str, rounds: int | None = None) -> Self:
        """The runs that a folder holds, to be resumed.

        Args:
            folder: where they are.
            rounds: how many rounds each is to have in all; None: as before.

        Raises:
            RunError: it holds none, or they had more rounds.
        """
        settings, seeds = _read(Path(folder))
        if rounds is not None:
            settings["rounds"] = rounds
        return cls(Config.create(**settings), seeds, folder)

    def place(self, seed: int) -> Path:
        """The run folder of a seed."""
        return self.folder / f"seed-{seed}"

    @property
    def missing(self) -> list[int]:
        """The seeds whose runs have not ended.

        Raises:
            RunError: a run is there with other settings, or ended without an update.
        """
        missing = [seed for seed in self.seeds if not self.ended(seed)]
        for seed in self.seeds:
            if seed not in missing:
                self.refuse_untrained(seed)
        return missing

    def ended(self, seed: int) -> bool:
        """Whether the run of a seed has ended.

        Raises:
            RunError: a run is there with other settings.
        """
        run = RunFolder(self.place(seed))
        if not run.config_file.exists():
            return False
        stored = Config.stored(run.config_file)
        config = self.configs[seed].as_found(stored)
        _refuse_others(run.path, "a run", stored, config)
        if in_memory(config.model.name):
            self._same_start(config.model.weights)
        run.know_objects(config)
        if not run.summary_file.exists():
            return False
        summary = run.summary()
        reason, rounds = summary["stopped_reason"], summary["rounds"]
        return bool(reason != "interrupted" and (reason != "completed" or rounds >= config.rounds))

    def refuse_untrained(self, seed: int) -> None:
        """See that the run of a seed, which has ended, learnt something, or raise a RunError."""
        run = RunFolder(self.place(seed))
        if (lines := run.metrics()) and all(line["skipped"] for line in lines):
            raise RunError(
                f"seed {seed}: no round of {run.path} had an update, so its model is untrained "
                "and excluded from means. Choose other settings in another folder, or remove "
                f"{run.path} to run this seed again"
            )

    def open(
        self, seed: int, notify: Notify = unnoticed, beside: Sequence[Path] = ()
    ) -> Simulation:
        """The run of a seed, to begin or to go on.

        Args:
            seed: which.
            notify: as for `Simulation`.
            beside: folders of other runs that it is to be compared with, under the same seed.

        Raises:
            RunError: it would start from other weights than the runs that are there, or of other
                data.
        """
        run, config = RunFolder(self.place(seed)), self.configs[seed]
        there = run.config_file.exists()
        rounds = None
        if not there:
            self._same_start(config.model.weights)
        elif (before := Config.stored(run.config_file)).reopened() != (
            config := config.as_found(before)
        ).reopened():
            run.refuse_while_locked()
            longer = before.reopened().model_copy(update={"rounds": config.rounds})
            if longer == config.reopened():
                rounds = config.rounds
            else:
                write_beside(run.config_file, config.chosen_as(before).dump().encode())
        # The clients of a generator are others under another seed.
        others = () if config.data.generator is not None else map(self.place, self.seeds)
        known = [place for place in (*beside, *others) if RunFolder(place).config_file.exists()]
        simulation = Simulation(
            None if there else config, self.place(seed), notify=notify, beside=known, rounds=rounds
        )
        # Only now is the config known to be sound.
        self._table_file.unlink(missing_ok=True)  # it lacks this run
        self._note()
        return simulation

    def _same_start(self, weights: Path | None) -> None:
        """See that a file of weights is what the other runs started from."""
        if weights is None:
            return
        for copy in self.folder.glob(f"seed-*/start{weights.suffix}"):
            try:
                changed = copy.read_bytes() != weights.read_bytes()
            except OSError as error:
                raise RunError(
                    f"the initial weights of {copy.parent} cannot be compared with model.weights "
                    f"({error}). Restore model.weights from the copy {copy}"
                ) from None
            if changed:
                raise RunError(
                    f"{weights} has changed since {copy.parent} started from it. Choose another "
                    f"folder, or restore it from the copy {copy}"
                )

    @contextmanager
    def naming(self, seed: int) -> Iterator[None]:
        """Errors in here say that they are of this seed's run."""
        try:
            yield
        except FedbayesError as error:
            raise type(error)(f"seed {seed}: {error}") from error
        except Exception as error:
            error.add_note(f"in the run of seed {seed}, {self.place(seed)}")
            raise

    def conclude(self) -> Metrics:
        """Write `seeds.json` once all runs have ended.

        Returns:
            Its content, `summary`.

        Raises:
            RunError: as for `summary`.
        """
        table = self.summary
        self._note()
        write_beside(self._table_file, (json_text(table, indent=2) + "\n").encode())
        return table

    @property
    def summary(self) -> Metrics:
        """Summarize the runs, by their own summaries: the seeds, and statistics of each metric.

        Each metric has its values in the order of the seeds, their mean and their sample standard
        deviation (n − 1 in the denominator; None for a single run).

        Raises:
            RunError: a run has not ended, or ended without an update.
        """
        if missing := self.missing:
            raise RunError(f"{self.folder}: the run of seed {missing[0]} has not ended")
        summaries = [RunFolder(self.place(seed)).summary() for seed in self.seeds]
        first = summaries[0]
        every = [seed_metrics(summary) for summary in summaries]
        names = list(dict.fromkeys(name for metrics in every for name in metrics))
        metrics = {name: [found.get(name) for found in every] for name in names}
        return {
            **{name: first[name] for name in ("method", "headline", "dataset", "model")},
            "seeds": self.seeds,
            "metrics": {
                name: {"mean": _mean(values), "std": sample_std(values), "values": values}
                for name, values in metrics.items()
                if any(value is not None for value in values)
            },
            "folder": str(self.folder),
        }

    @property
    def _table_file(self) -> Path:
        return self.folder / "seeds.json"

    @property
    def runs(self) -> dict[int, Result]:
        """The runs by seed.

        Raises:
            RunError: one has not ended.
        """
        return {seed: Result(self.place(seed), self._temporary) for seed in self.seeds}

    def frame(self, of: str = "rounds") -> "pd.DataFrame":
        """Metrics of all runs, one below the other, by seed.

        Args:
            of: as for `Result.frame`.

        Raises:
            RunError: a run has not ended, or as for `Result.frame`.
        """
        import pandas as pd

        frames = {seed: run.frame(of) for seed, run in self.runs.items()}
        return pd.concat(frames, names=["seed"])

    def _note(self) -> None:
        """Write down what is run here."""
        table = {"seeds": self.seeds, **_shared(self.configs[self.seeds[0]])}
        write_beside(self.folder / SEEDS_FILE, tomli_w.dumps(table).encode())


def run_seeds(
    config: Config | Path | str | None = None,
    seeds: int | Sequence[int] = 5,
    folder: Path | str | None = None,
    *,
    out: Path | str | None = None,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> SeedRuns:
    """Run a config with several seeds, sequentially.

    Args:
        config: the settings, or give them as keyword arguments, as for `fedbayes.run`.
        seeds: how many, from the config's seed on, or which: `seeds=[0, 3]`.
        folder: where the run folders `seed-0` and so on are made; a temporary one if None. Runs
            that have ended there are kept; an interrupted run is resumed.
        out: the same by the name that it has on the command line.
        listener: as for `fedbayes.run`, told of every run.
        track: as for `fedbayes.run`.
        progress: as for `fedbayes.run`.
        **settings: keys of the config, where there is no `config`, as for `fedbayes.run`.

    Returns:
        The runs by seed (`.runs`), and mean and standard deviation of their metrics
        (`.summary["metrics"]`).

    Raises:
        FedbayesError: of one of the runs; the text begins with its seed.

    Examples:
        >>> import fedbayes
        >>> found = fedbayes.run_seeds(data="digits", rounds=1, seeds=2)
        >>> list(found.runs)
        [0, 1]
    """
    check(track)
    return _to_the_end(
        SeedRuns(Config.given(config, settings), seeds, either(folder=folder, out=out)),
        listener,
        track,
        progress,
    )


def resume_seeds(
    folder: Path | str,
    *,
    rounds: int | None = None,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
) -> SeedRuns:
    """Resume runs under several seeds that were interrupted.

    Args:
        folder: as for `run_seeds`.
        rounds: how many rounds each is to have in all, also after it has ended; None: as before.
        listener: as for `run_seeds`.
        track: as for `run_seeds`.
        progress: as for `run_seeds`.

    Examples:
        >>> import fedbayes
        >>> found = fedbayes.run_seeds(data="digits", rounds=1, seeds=2)
        >>> fedbayes.resume_seeds(found.folder, rounds=2).runs[0].summary["rounds"]
        2
    """
    return _to_the_end(SeedRuns.stored(folder, rounds), listener, track, progress)


def _to_the_end(
    repeated: SeedRuns, listener: Listener | None, track: Sequence[str], progress: bool | None
) -> SeedRuns:
    for seed in repeated.missing:
        with repeated.naming(seed):
            complete(
                lambda notify, seed=seed: repeated.open(seed, notify),  # type: ignore[misc]
                listener,
                track,
                progress,
                title=f"seed {seed}: ",
            )
    repeated.conclude()
    return repeated


def _numbers(seeds: int | Sequence[int], first: int) -> list[int]:
    """The seeds as plain integers: these, or so many from the first on."""
    if _whole(seeds):
        given: list[Any] = list(range(first, first + int(seeds)))
    else:
        try:
            given = list(seeds)  # type: ignore[arg-type]
        except TypeError:  # nothing to go through
            given = []
    numbers = [int(seed) for seed in given if _whole(seed)]
    if not numbers or len(set(numbers)) < len(given):
        raise ConfigError(
            f"seeds is {seeds!r}. Give a number of 1 or more, or a list of different seeds"
        )
    return numbers


def _whole(value: object) -> TypeGuard[int]:
    """Whether this is an integer; true and false are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def seed_metrics(summary: Metrics) -> dict[str, float]:
    """The metrics of a run, its headline first, that of its best round, and `COSTS`."""
    tables = {"metrics": summary["metrics"]}
    metrics, headline = flat(tables), summary["headline"]
    found = {name: metrics[name] for name in sorted(metrics, key=headline.__ne__)}
    if "best_round" in summary:
        found[f"best_{headline}"] = flat({"metrics": summary["best_metrics"]})[headline]
    return found | {name: summary[name] for name in COSTS}


def _with_seed(config: Config, seed: int) -> Config:
    return Config.create(**{**config.model_dump(), "seed": seed})


def _refuse_others(folder: Path, what: str, before: Config, now: Config) -> None:
    """See that runs go on with the settings that they had, but for more rounds and other places."""
    changed = Inventory(before.reopened().dump()).changes(now.reopened().dump())
    if before.rounds > now.rounds or not all(is_free(key, _FREE) for key in changed):
        raise RunError(
            f"{folder} has {what} with other settings: {'; '.join(changed.values())}. Restore the "
            "settings, or choose another folder"
        )


def _shared(config: Config) -> dict[str, Any]:
    """The settings but the seed, as they are written."""
    settings = config.model_dump(mode="json", exclude_none=True)
    del settings["seed"]
    return settings


def _read(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """Settings and seeds of a folder."""
    path = folder / SEEDS_FILE
    try:
        settings = parse_toml(read_text(path))
        seeds = settings.pop("seeds")
        return renewed(settings), seeds
    except FileNotFoundError:
        raise RunError(f"{folder} has no runs of several seeds: it has no {SEEDS_FILE}") from None
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} is damaged: {error}") from None


def _mean(values: Sequence[float | None]) -> float | None:
    known = _finite(values)
    return statistics.fmean(known) if len(known) == len(values) else None


def sample_std(values: Sequence[float | None]) -> float | None:
    """Standard deviation of a sample; None of fewer than two, or if one is no finite number."""
    known = _finite(values)
    return statistics.stdev(known) if len(known) == len(values) > 1 else None


def _finite(values: Sequence[float | None]) -> list[float]:
    """Those that a mean can be of."""
    return [value for value in values if value is not None and math.isfinite(value)]
