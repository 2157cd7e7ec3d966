"""The run folder: everything that a run leaves on disk, and how a run resumes after a kill.

    config.toml          All settings, resolved.
    partition.npz        Which client has which rows; absent where a function gives them.
    preprocessing.json   What a network sees of a raw sample; names of classes and features.
    start.*              The weights that it started from, if they came from a file.
    data.*               The data, if they are kept here (data.keep), as those of a DataFrame are.
    metrics.jsonl        One line per round.
    checkpoints/         The state after a round. A resume starts from the newest one; the folder
                         may also hold the best one, or all.
    clients/             Private states of clients, one file each.
    versions/            In asynchronous rounds, states of the server that clients are at work from.
    model.safetensors    The global model, of the last round or of the best.
    summary.json         The result.
    SHA256SUMS           Digests of the files of a run that has ended, for `sha256sum -c`.
    activity.json        Current work of the process (see `fedbayes.storage.heartbeat`).
    .lock                Held by the process that resumes the run.

A round counts once its checkpoint is there. Every file is written aside and renamed. A resumed run
removes the files of an unfinished round.

A checkpoint has a digest of itself, of each private state, of the lines of metrics so far, and of
what stays as it is (see `fedbayes.storage.inventory`); `SHA256SUMS` has those of what is written at
the end. Every read compares a file with its digest, and a file that differs raises an error.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbayes.config.config import Config
from fedbayes.config.given import objects, tables
from fedbayes.core.files import (
    SEEDS_FILE,
    SUMS_FILE,
    Pieces,
    digest,
    flush,
    json_text,
    parse_toml,
    read_bytes,
    read_text,
    writable_folder,
    write_beside,
)
from fedbayes.core.lazy import in_memory
from fedbayes.core.messages import decode_file
from fedbayes.core.seals import check_seal, sealed
from fedbayes.core.tensors import Tensors
from fedbayes.core.wording import listed
from fedbayes.data import Partition, Preprocessing
from fedbayes.data.numbered import Numbered
from fedbayes.errors import ConfigError, DataError, MessageError, RunError, told_as, warn
from fedbayes.federation.engine_table import ENGINES
from fedbayes.models import CARD
from fedbayes.storage.card import Card
from fedbayes.storage.checkpoints import Checkpoints
from fedbayes.storage.heartbeat import ACTIVITY_FILE
from fedbayes.storage.inventory import Inventory, dotted, is_free
from fedbayes.storage.lock import RunLock
from fedbayes.storage.metrics_file import Metrics, MetricsFile, table, undefined
from fedbayes.storage.private_states import START_AGAIN
from fedbayes.storage.progress import Progress
from fedbayes.storage.sums_file import SumsFile

NO_UPDATE = "no round had an update"
"""Why a run ended whose model is the untrained start."""

CONNECTION_FILE = "connection.txt"

_objects: dict[Path, dict[str, str]] = {}
"""Of run folders that this process began or knows of: what Python objects are called
here (`lazy.own`), by their names in the config."""


class RunFolder(os.PathLike[str]):
    """The files of one run; where a path is wanted, that of the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.connection_file = path / CONNECTION_FILE
        self.partition_file = path / "partition.npz"
        self.preprocessing_file = path / "preprocessing.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.clients = path / "clients"
        self.versions = path / "versions"
        self.model_file = path / "model.safetensors"
        self.summary_file = path / "summary.json"
        self.sums_file = path / SUMS_FILE
        self.sums = SumsFile(self.sums_file, self.summary_file, lambda: self.resume_command)
        self.lines = MetricsFile(self.metrics_file, self.checkpoints, self.sums)
        self._lock: RunLock | None = None
        self._fixed: dict[str, str] = {}
        self._headline = "", True

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.path / name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RunFolder | Path):
            return self.path == Path(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.path)

    if not TYPE_CHECKING:  # what is misspelt here is still found

        def __getattr__(self, name: str) -> Any:
            """All that a path can be asked, as in `run.folder.name` and `run.folder.exists()`."""
            if name.startswith("_") or name == "path":
                raise AttributeError(name)
            try:
                return getattr(self.path, name)
            except AttributeError:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None

    @property
    def _of_rounds(self) -> list[Path]:
        """What only a run that had rounds leaves besides its checkpoints."""
        return [self.metrics_file, self.summary_file, self.model_file, self.clients]

    def require_vacant(self) -> None:
        """Check that the folder is writable, and holds neither a run nor files of one.

        A new run would otherwise resume from the old checkpoint, and keep the old partition.

        Raises:
            RunError: the folder holds a run or files of one, or cannot be written.
        """
        writable_folder(self.path, "the run folder")
        if self.config_file.exists():
            raise RunError(
                f"{self.path} already has a run. Choose another folder, or continue it with "
                f"`{self.resume_command}`"
            )
        if (self.path / SEEDS_FILE).exists():
            raise RunError(f"{self.path} already has runs of several seeds. Choose another folder")
        left = [*self._of_rounds, self.partition_file, self.preprocessing_file, self.sums_file]
        left += map(self.checkpoints.file, self.rounds())
        if traces := [str(path.relative_to(self.path)) for path in left if path.exists()]:
            raise RunError(
                f"{self.path} has files of another run, {listed(traces)}, but no "
                f"{self.config_file.name}. Choose another folder, or move them away"
            )

    def lock(self) -> None:
        """Keep all others from going on with the run until `unlock`, or the end of this process.

        Raises:
            RunError: another process is at work on it, or the folder cannot be written.
        """
        with told_as(RunError, f"cannot write the run folder {self.path}", OSError):
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.path)

    def refuse_while_locked(self) -> None:
        """See early that no other process is at work on the run, or raise a RunError."""
        if self.config_file.exists():
            RunLock(self.path).release()

    def unlock(self) -> None:
        """Give back what `lock` took."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def create(
        self,
        config: Config,
        division: Partition | None,
        preprocessing: Preprocessing,
        headline: tuple[str, bool] = ("", True),
    ) -> None:
        """Make the folder; what is there already stays as it is.

        Args:
            config: all settings.
            division: which client has which rows; None where a function gives them.
            preprocessing: what a network sees of a raw sample.
            headline: name of the metric that the run is for, and whether higher is better.

        Raises:
            RunError: it cannot be made.
        """
        with told_as(RunError, f"cannot write the run folder {self.path}", OSError):
            self._headline = headline
            self.checkpoints.path.mkdir(parents=True, exist_ok=True)
            if not self.config_file.exists():
                if (start := config.model.weights) is not None:
                    write_beside(self.path / f"start{start.suffix}", read_bytes(start))
                if config.data.keep and config.data.path is not None:
                    write_beside(self._kept_data(config), read_bytes(config.data.path))
                write_beside(self.config_file, config.dump().encode())
            if not self.preprocessing_file.exists():
                write_beside(self.preprocessing_file, preprocessing.dump())
            if division is not None and not self.partition_file.exists():
                write_beside(self.partition_file, division.dump())
            divided = () if division is None else (self.partition_file,)
            copies = (*self.path.glob("start.*"), *self.path.glob("data.*"))
            fixed = (self.preprocessing_file, *divided, *copies)
            self._fixed = {path.name: digest(read_bytes(path)) for path in fixed}

    def fixed_files(self) -> dict[str, bytes]:
        """The files that stay as they are, by name: what clients are built from elsewhere.

        Raises:
            RunError: one cannot be read, or is not what it was.
        """
        names = (self.config_file.name, *sorted(self._fixed))
        with told_as(RunError, f"cannot read the run folder {self.path}", OSError):
            return {name: self._checked(self.path / name) for name in names}

    def require_run(self) -> None:
        """See that there is a run here, or raise a RunError."""
        if (self.path / SEEDS_FILE).exists():
            raise RunError(f"{self.path} has runs of several seeds. Give one of its folders seed-*")
        if not self.config_file.exists():
            within = any(self.path.glob("*/config.toml"))
            hint = f". Give the run folders in it: {self.path}/*/" if within else ""
            raise RunError(
                f"{self.path} is not a run folder: it has no {self.config_file.name}{hint}"
            )

    def config(self) -> Config:
        """The run's settings; what they name as `package.module:Class` is imported.

        Raises:
            RunError: there is no run here.
        ConfigError: it names Python objects of the process that began it.
        """
        self.require_run()
        config = Config.stored(self.config_file, objects=_objects.get(self.path.absolute(), {}))
        # The copies count: the files may have gone, or have changed.
        if (start := config.model.weights) is not None:
            kept = (self.path / f"start{start.suffix}").absolute()
            model = config.model.model_copy(update={"weights": kept})
            config = config.model_copy(update={"model": model})
        if config.data.keep:
            kept = self._kept_data(config).absolute()
            data = config.data.model_copy(update={"path": kept})
            config = config.model_copy(update={"data": data})
        return config

    def know_objects(self, config: Config) -> None:
        """Keep in mind that the run's config names Python objects as this process does.

        Args:
            config: as it is, or will be, in the folder.
        """
        known = {place: place for _, place in objects(config.model_dump(mode="json"))}
        _objects.setdefault(self.path.absolute(), {}).update(known)

    @property
    def has_objects(self) -> bool:
        """Whether the run's config names Python objects that only this process has."""
        return bool(_objects.get(self.path.absolute()))

    def give_objects(self, given: Mapping[str, Any]) -> None:
        """Say which Python objects of this process those are that the run's config names.

        Args:
            given: settings with the objects, as `fedbayes.run` takes them.

        Raises:
            RunError: there is no run here.
            ConfigError: one is given of a setting that names none, or a setting differs.
        """
        if not given:
            return
        self.require_run()
        stored = dict(dotted(parse_toml(read_text(self.config_file))))
        names: dict[str, str] = {}
        for key, now in dotted(tables(given)):
            before = stored.get(key)
            if isinstance(before, str) and in_memory(before):
                names[before] = now
            elif isinstance(before, list) and any(map(in_memory, before)):
                names |= dict(zip(before, now, strict=False))
            elif before != now and key != "model.weights":  # of which the folder has a copy
                raise ConfigError(
                    f"{key} of {self.path} is {before!r}, and resume cannot change settings. Give "
                    "resume only the Python objects of the run that no module has"
                )
        known = _objects.setdefault(self.path.absolute(), {})
        known.update(names)

    def set_rounds(self, rounds: int) -> None:
        """Write how many rounds the run is to have into its config, which stays as it is else.

        Raises:
            RunError: the config does not say how many it was to have.
        """
        before = read_text(self.config_file)
        now, found = re.subn(r"\A((?:(?!\[).*\n)*?rounds *= *)\d+", rf"\g<1>{rounds}", before)
        if not found:
            raise RunError(f"{self.config_file} has no rounds. Write rounds = {rounds} into it")
        write_beside(self.config_file, now.encode())

    def _kept_data(self, config: Config) -> Path:
        """The copy of the data that the folder holds, if it holds one."""
        return self.path / f"data{config.data.suffix}"

    def config_changes(self) -> dict[str, str]:
        """How the config differs from the one that the run was made with, by key.

        Nothing that it names is looked up, and a folder without a checkpoint has no other config.

        Raises:
            RunError: the config, or the newest checkpoint, cannot be read.
        """
        known = self.inventory()
        if known is None:
            return {}
        with told_as(RunError, f"cannot read {self.config_file}", OSError, ValueError):
            return known.changes(read_text(self.config_file))

    def refuse_changed_config(self) -> None:
        """Check that the run would resume with the settings that it had, and report them.

        Raises:
            RunError: a setting differs that changes the results; the message names it.
        """
        if bound := self._changed(free=False):
            raise RunError(
                f"{self.config_file} differs from the config of the run in "
                f"{self.checkpoints.newest_name}: {bound}. Restore it, or "
                "start a new run with it"
            )

    def refuse_moved_states(self, clients: int, engine: str) -> None:
        """See that an engine finds private states, or raise a RunError that says which would."""
        known = self.inventory()
        before = engine if known is None else str(parse_toml(known.config)["engine"])
        if not clients or before not in ENGINES:
            return
        if (place := ENGINES[before].states) == ENGINES[engine].states:
            return
        able = [name for name, kind in ENGINES.items() if kind.states == place]
        raise RunError(
            f"{clients} clients of {self.path} have private states of engine {before!r}, which "
            f"engine {engine!r} cannot find. Set engine to {' or '.join(able)}, or start a new "
            "run"
        )

    def free_changes(self) -> str:
        """What to say of settings that differ and may; empty if none do."""
        free = self._changed(free=True)
        return free and f"{self.config_file} has changed since the last round: {free}"

    def _changed(self, *, free: bool) -> str:
        """How settings differ that may while a run is interrupted, or that may not."""
        changes = self.config_changes().items()
        return listed([how for key, how in changes if is_free(key) == free], between="; ")

    def require_resumable(self) -> None:
        """See that the run that is here can go on, and say which settings differ that may.

        Raises:
            RunError: there is none, another process is at work on it, a setting differs that may
                not, or a file is gone or damaged that stays as it is.
        """
        self.require_run()
        self.refuse_while_locked()
        self.refuse_changed_config()
        if text := self.free_changes():
            warn(text)
        known = self.inventory()
        for name in {} if known is None else known.files:
            if not (self.path / name).exists():
                raise RunError(f"{self.path / name} no longer exists; {START_AGAIN}")
        self.check_start()

    def check_start(self) -> None:
        """See that the weights that the run started from are unchanged, or raise a RunError."""
        known = self.inventory()
        for name in [] if known is None else known.files:
            if name.startswith("start."):
                self._checked(self.path / name)

    def _checked(self, path: Path) -> bytes:
        """The content of a file that stays as it is."""
        known = self.inventory()
        try:
            data = read_bytes(path)
        except FileNotFoundError:
            lost = known is not None and path.name in known.files
            if lost and path != self.preprocessing_file:  # the data tell what that said
                raise RunError(f"{path} no longer exists; {START_AGAIN}") from None
            raise
        if known is not None and not known.holds(path.name, data):
            raise RunError(
                f"{path} is damaged: it differs from its record in "
                f"{self.checkpoints.newest_name}; {START_AGAIN}"
            )
        return data

    def preprocessing(self) -> Preprocessing | None:
        """What the run's network sees of a raw sample; None in a folder of an older version.

        Raises:
            RunError: the file is damaged.
        """
        try:
            return Preprocessing.load(self._checked(self.preprocessing_file))
        except FileNotFoundError:
            if (known := self.inventory()) and self.preprocessing_file.name in known.files:
                warn(
                    f"{self.preprocessing_file} no longer exists, so its numbers are computed "
                    "from the data"
                )
            return None
        except (OSError, DataError) as error:
            raise RunError(f"{self.preprocessing_file} is damaged: {error}") from None

    def partition(self) -> Partition | None:
        """Which client has which rows; None where the run was killed before it was written.

        Raises:
            RunError: the file is damaged.
        """
        try:
            return Partition.load(self.partition_file, self._checked(self.partition_file))
        except FileNotFoundError:
            return None
        except (OSError, DataError) as error:
            raise RunError(str(error)) from None

    def generated_clients(self) -> int | None:
        """How many clients there are whose samples a function gives; None where they are divided
        from a pool.

        Nothing that the config names is looked up.

        Raises:
            RunError: the config cannot be read.
        """
        data = self._of_generator()
        return int(data["clients"]) if data else None

    def _of_generator(self) -> dict[str, Any]:
        """The settings of the data where a function gives them; empty where none does."""
        with told_as(RunError, f"cannot read {self.config_file}", OSError, ValueError):
            data = parse_toml(read_text(self.config_file)).get("data", {})
        return data if isinstance(data, dict) and data.get("generator") else {}

    def client_names(self) -> Sequence[str]:
        """Names of the clients, and of those of a function that are only tested on.

        Raises:
            RunError: the run's partition cannot be read.
        """
        if data := self._of_generator():
            tested = int(data["test_clients"]) if data["test"] == "clients" else 0
            return Numbered(int(data["clients"]) + tested)
        if (division := self.partition()) is None:
            raise RunError(f"partition file not found: {self.partition_file}")
        return division.names

    def find_client(self, name: str | int) -> int:
        """Index of the client of this name, or else of this number. A RunError if there is none."""
        names = self.client_names()
        if str(name) in names:
            return names.index(str(name))
        if str(name).isdecimal() and int(name) < len(names):
            return int(name)
        raise RunError(f"{self.path} has no client {name!r}. Its clients are {listed(names)}")

    def save(self, progress: Progress, best: int = 0) -> list[Path]:
        """Write a checkpoint: from here on the round counts.

        Args:
            progress: the state after it.
            best: the round whose checkpoint is kept as the best; 0 for none.

        Returns:
            Files that have yet to reach the disk.
        """
        known = Inventory(
            read_text(self.config_file),
            self._fixed,
            self.lines.size,
            self.lines.digest,
            *self._headline,
            best,
        )
        written = self.checkpoints.write(progress, known)
        return [self.metrics_file, written, self.checkpoints.path]

    def rounds(self) -> list[int]:
        """The rounds that there are checkpoints of, ascending."""
        return self.checkpoints.rounds()

    def inventory(self) -> Inventory | None:
        """As `Checkpoints.inventory`."""
        return self.checkpoints.inventory()

    def best_round(self) -> int | None:
        """The round that the run's models are of, where the best is kept; None for the last."""
        return self.summary().get("best_round") if self.summary_file.exists() else None

    def progress(self, number: int | None = None) -> Progress | None:
        """The state after round `number`, or after the last one; None before the first.

        Raises:
            RunError: there is no such checkpoint, or it is damaged.
        """
        if number is not None:
            return self.checkpoints.progress(number)
        newest = self.checkpoints.newest()
        return newest if newest is not None and newest.round else None

    def refuse_lost_checkpoint(self) -> None:
        """See that a run without a checkpoint never had one, so that it may begin, or raise a
        RunError.
        """
        self.metrics()  # what is damaged is told first
        if traces := [path.name for path in self._of_rounds if path.exists()]:
            raise RunError(
                f"{self.checkpoints.path} has no checkpoint, but the run had rounds, because it "
                f"has {', '.join(traces)}. Restore the newest checkpoint from a copy, or start a "
                "new run in another folder"
            )

    def metrics(self) -> list[Metrics]:
        """The lines of all rounds, as `MetricsFile.read`."""
        return self.lines.read()

    def remove_leftovers(self) -> None:
        """Remove halves of files that a killed process left next to them; for who has the lock."""
        for folder in (self.path, self.checkpoints.path):
            for path in folder.glob(".*"):
                name, _, mark = path.name[1:].rpartition(".")
                ours = name in _OURS or name.startswith(("start.", "data.", "round-"))
                if ours and mark.isdecimal():
                    path.unlink(missing_ok=True)

    def reopen(self) -> None:
        """Remove what an interrupted run left at its end: it is no longer so once rounds follow."""
        self.summary_file.unlink(missing_ok=True)
        self.model_file.unlink(missing_ok=True)
        self.sums_file.unlink(missing_ok=True)

    def finish(self, model: Tensors | None, summary: Metrics, card: Card) -> None:
        """Write the summary, and the global model with its card if there is one."""
        text = (json_text(summary, indent=2) + "\n").encode()
        written: dict[str, bytes | Pieces] = {self.summary_file.name: text}
        if model is not None:
            data = sealed(dict(model), {CARD: card.dump()})
            write_beside(self.model_file, data)
            written[self.model_file.name] = data
        fixed = (self.config_file, self.metrics_file, *map(self.checkpoints.file, self.rounds()))
        sums = self._fixed | {
            str(path.relative_to(self.path)): digest(read_bytes(path)) for path in fixed
        }
        sums |= {name: digest(data) for name, data in written.items()}
        lines = "".join(f"{value}  {name}\n" for name, value in sorted(sums.items()))
        write_beside(self.sums_file, lines.encode())
        # Last, since a run with a summary has ended.
        write_beside(self.summary_file, text)
        for name in sums:
            flush(self.path / name)
        flush(self.path)

    def keep_connection(self, options: Iterable[str]) -> None:
        """Store the options by which a federation reaches its SuperLink."""
        write_beside(self.connection_file, "\n".join(options).encode())

    @property
    def connection(self) -> list[str]:
        """The options by which a federation reaches its SuperLink; none of another run."""
        try:
            return read_text(self.connection_file).splitlines()
        except (OSError, ValueError):
            return []

    @property
    def resume_command(self) -> str:
        """The command that resumes the run, with the options of its connection."""
        if options := self.connection:
            return shlex.join(["fedbayes", "federate", "resume", str(self.path), *options])
        return f"fedbayes resume {shlex.quote(str(self.path))}"

    def model(self) -> Tensors:
        """The global model at the end.

        Raises:
            RunError: the run has not ended, its method has no global model, or the file is
                damaged.
        """
        if not self.model_file.exists():
            summary = self.summary()
            if "model_round" not in summary:
                raise RunError(
                    f"{self.path} has no global model: under {summary.get('method')} only clients "
                    "have models"
                )
        data = self.model_bytes()
        with told_as(RunError, f"cannot read the model {self.model_file}", MessageError):
            check_seal(data)
            return decode_file(data, plain=True)

    def model_bytes(self) -> bytes:
        """The file of the global model.

        Raises:
            RunError: it is gone, cannot be read, or is not what the run left at its end.
        """
        gone = f"the model {self.model_file} no longer exists. Write it again"
        return self._of_the_end(self.model_file, gone)

    def summary(self) -> Metrics:
        """The result of the run. A RunError if the run has not ended, or the file is damaged."""
        name = self.summary_file.name
        gone = f"the run in {self.path} has not ended, so it has no {name}. Resume it"
        data = self._of_the_end(self.summary_file, gone)
        with told_as(RunError, f"{self.summary_file} is damaged", ValueError):
            summary = table(data)
        for name in ("metrics", "best_metrics"):
            whose = summary.get(name)
            undefined(whose.values() if isinstance(whose, dict) else ())
        return summary

    def _of_the_end(self, path: Path, gone: str) -> bytes:
        """A file that the run left at its end, as it was; `gone` says that it is not there."""
        if not path.exists():
            raise RunError(f"{gone}: {self.resume_command}")
        with told_as(RunError, f"cannot read {path}", OSError):
            data = read_bytes(path)
        self.sums.check(path, data)
        return data


_OURS = {
    "config.toml",
    "partition.npz",
    "preprocessing.json",
    "metrics.jsonl",
    "model.safetensors",
    "summary.json",
    SUMS_FILE,
    ACTIVITY_FILE,
    CONNECTION_FILE,
}
