"""The run folder: everything that a run leaves on disk, and how it goes on after a kill.

    config.toml          all settings, resolved
    partition.npz        which client has which rows
    preprocessing.json   what a network sees of a raw sample; names of classes and features
    start.*              the weights that it started from, if they came from a file
    metrics.jsonl        one line a round
    checkpoints/         the state after a round; the newest one is where a resume starts, and
                         beside it may be the best one, or all
    clients/             private states of clients, one file each
    model.safetensors    the global model, of the last round or of the best
    summary.json         what came of it

A round counts once its checkpoint is there. Every file is written beside and renamed, and what
an unfinished round left behind is removed when the run is resumed.
"""

import json
import os
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedbayes.data import Partition, Preprocessing
from fedbayes.data.wording import listed
from fedbayes.errors import DataError, MessageError, RunError
from fedbayes.federation.privacy.spending import Spending
from fedbayes.federation.weights import none_yet
from fedbayes.messages import decode, dense, encode
from fedbayes.models import CARD
from fedbayes.runs.card import Card
from fedbayes.runs.config import Config
from fedbayes.runs.scores import ClientScores
from fedbayes.tensors import Tensors, pack, unpack

SEEDS_FILE = "seeds.toml"
"""In a folder of several runs, what they share; see `fedbayes.tools.seed_runs`."""
NO_UPDATE = "no round had an update"
"""Why a run ended whose model is the untrained start."""

Metrics = dict[str, Any]
"""A line of `metrics.jsonl`."""


@dataclass(frozen=True)
class Progress:
    """The state of a run between two rounds."""

    round: int
    """Rounds done."""
    server: Tensors
    """The server's state, packed."""
    clients: ClientScores
    """Of each client, scores of the model that it last reported."""
    stored: Tensor
    """Of each client, the round that its private state on disk is of; 0 if none, int64 [S]."""
    bytes_down: int = 0
    """Bytes sent to clients so far."""
    bytes_up: int = 0
    """Bytes received from clients so far."""
    refused: int = 0
    """Reports refused so far."""
    seconds: float = 0.0
    """Time that the rounds took."""
    constants: str = ""
    """Digest of the frozen parameters that the rounds were made with; empty without any."""
    privacy: Spending = Spending.empty()  # noqa: RUF009 - it is frozen
    """What the rounds have spent of privacy, as they were run."""
    weights: Tensor = field(default_factory=lambda: none_yet(0))
    """Of each client, the weight of its first report that counted; 0 if none did, float64 [S], or
    [0] as by an older version."""


def write_beside(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)


def writable(path: Path, what: str, formats: Sequence[str] = ()) -> None:
    """Make sure early that a file can be written, so that no work is lost.

    Args:
        path: the file.
        what: is to be written, for messages.
        formats: suffixes of the formats that there are; any by default.

    Raises:
        RunError: its suffix is of no format that there is, its folder is absent or closed, or the
            path is a folder.
    """
    if path.is_dir():
        raise RunError(f"{what} {path} is a folder; name a file")
    if formats and path.suffix.lower() not in formats:
        raise RunError(
            f"{what} {path}: the suffix says the format; name a file that ends in "
            f"{', '.join(formats[:-1])}{' or ' if formats[1:] else ''}{formats[-1]}"
        )
    if not path.parent.is_dir():
        raise RunError(f"{what} {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise RunError(f"{what} {path}: cannot write into {path.parent}")


class ClientStates(MutableMapping[int, bytes]):
    """Private states of clients as files, with the last complete round's kept until the next.

    A file is named by client and round. Writing one leaves the older one alone, since a kill may
    take the run back to it; `commit` removes what no checkpoint needs.

    Args:
        folder: where the files are.
        stored: of each client, the round of its newest state; 0 if none, int64 [S].
    """

    def __init__(self, folder: Path, stored: Tensor) -> None:
        self._folder = folder
        self.stored = stored.clone()
        """Of each client, the round of its newest state; 0 if none."""
        self.round = 0
        """The round that is being run."""
        self._superseded: list[Path] = []

    def _path(self, client: int, number: int) -> Path:
        return self._folder / f"{client:07d}-{number:07d}.safetensors"

    def __getitem__(self, client: int) -> bytes:
        number = int(self.stored[client])
        if not number:
            raise KeyError(client)
        try:
            return self._path(client, number).read_bytes()
        except OSError as error:
            raise RunError(f"the state of client {client} is lost: {error}") from None

    def __setitem__(self, client: int, state: bytes) -> None:
        self._folder.mkdir(exist_ok=True)
        before = int(self.stored[client])
        if before and before != self.round:
            self._superseded.append(self._path(client, before))
        write_beside(self._path(client, self.round), state)
        self.stored[client] = self.round

    def __delitem__(self, client: int) -> None:
        raise TypeError("a client's state is replaced, never deleted")

    def __iter__(self) -> Iterator[int]:
        return iter(self.stored.nonzero()[:, 0].tolist())

    def __len__(self) -> int:
        return int((self.stored > 0).sum())

    def _named(self, stored: Tensor | None) -> set[Path]:
        """The files of the states that a checkpoint names."""
        if stored is None:
            return set()
        return {self._path(c, int(stored[c])) for c in stored.nonzero()[:, 0].tolist()}

    def commit(self, best: Tensor | None = None) -> None:
        """Remove the states that the checkpoint just written no longer names.

        Args:
            best: the `stored` of another checkpoint that is kept, int64 [S]; None if there is none.
        """
        needed = self._named(best) if self._superseded else set()
        for path in self._superseded:
            if path not in needed:
                path.unlink(missing_ok=True)
        self._superseded = [path for path in self._superseded if path in needed]

    def remove_strays(self, *, keep_older: bool, best: Tensor | None = None) -> None:
        """Remove what a killed process left behind: states of a round that never completed and,
        unless older checkpoints are kept, states that a later round replaced.

        Args:
            keep_older: whether all older checkpoints are kept.
            best: as for `commit`.
        """
        if not self._folder.is_dir():
            return
        current, needed = self._named(self.stored), self._named(best)
        self._superseded = [path for path in needed - current if path.exists()]
        for path in self._folder.iterdir():
            number = path.stem.rpartition("-")[2]
            older = number.isdigit() and int(number) <= self.round
            if path not in current | needed and not (keep_older and older):
                path.unlink()


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.partition_file = path / "partition.npz"
        self.preprocessing_file = path / "preprocessing.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.clients = path / "clients"
        self.model_file = path / "model.safetensors"
        self.summary_file = path / "summary.json"

    def refuse_second_run(self) -> None:
        """See that no run is here yet.

        Raises:
            RunError: there is one.
        """
        if self.config_file.exists():
            raise RunError(
                f"{self.path} already holds a run; choose another folder, or continue it with "
                f"`fedbayes resume {self.path}`"
            )
        if (self.path / SEEDS_FILE).exists():
            raise RunError(
                f"{self.path} already holds runs of several seeds; choose another folder"
            )

    def create(self, config: Config, division: Partition, preprocessing: Preprocessing) -> None:
        """Make the folder; what is there already stays as it is.

        Raises:
            RunError: it cannot be made.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            if not self.config_file.exists():
                if (start := config.model.weights) is not None:
                    write_beside(self.path / f"start{start.suffix}", start.read_bytes())
                write_beside(self.config_file, config.dump().encode())
            if not self.preprocessing_file.exists():
                write_beside(self.preprocessing_file, preprocessing.dump())
            if not self.partition_file.exists():
                division.save(self.partition_file)
        except OSError as error:
            raise RunError(f"cannot write the run folder {self.path}: {error}") from None

    def config(self) -> Config:
        """The run's settings.

        Raises:
            RunError: there is no run here.
        """
        if (self.path / SEEDS_FILE).exists():
            raise RunError(
                f"{self.path} holds runs of several seeds; the runs are its folders seed-*"
            )
        if not self.config_file.exists():
            raise RunError(f"{self.path} holds no run: there is no {self.config_file.name}")
        config = Config.load(self.config_file)
        start = config.model.weights
        if start is None:
            return config
        # The copy counts: the file may have gone, or have changed.
        kept = (self.path / f"start{start.suffix}").absolute()
        model = config.model.model_copy(update={"weights": kept})
        return config.model_copy(update={"model": model})

    def preprocessing(self) -> Preprocessing | None:
        """What the run's network sees of a raw sample; None in a folder of an older version.

        Raises:
            RunError: the file is damaged.
        """
        try:
            return Preprocessing.load(self.preprocessing_file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, DataError) as error:
            raise RunError(f"{self.preprocessing_file} is damaged: {error}") from None

    def client_names(self) -> tuple[str, ...]:
        """Names of the clients.

        Raises:
            RunError: the run's partition cannot be read.
        """
        try:
            return Partition.load(self.partition_file).names
        except DataError as error:
            raise RunError(str(error)) from None

    def find_client(self, name: str | int) -> int:
        """Index of the client of this name, or else of this number.

        Raises:
            RunError: there is none.
        """
        names = self.client_names()
        if str(name) in names:
            return names.index(str(name))
        if str(name).isdecimal() and int(name) < len(names):
            return int(name)
        raise RunError(f"{self.path} has no client {name!r}; there are {listed(names)}")

    def save(self, progress: Progress, keep: Literal["last", "best", "all"], best: int = 0) -> None:
        """Write a checkpoint: from here on the round counts.

        Args:
            progress: the state.
            keep: which of the others stay.
            best: the best round so far; 0 if there is none.
        """
        newest = self._checkpoint(progress.round)
        write_beside(newest, encode(pack(progress)))
        if keep == "all":
            return
        kept = {newest, self._checkpoint(best)} if keep == "best" else {newest}
        for path in self.checkpoints.glob("*.safetensors"):
            if path not in kept:
                path.unlink()

    def _checkpoint(self, number: int) -> Path:
        return self.checkpoints / f"round-{number:07d}.safetensors"

    def rounds(self) -> list[int]:
        """The rounds that there are checkpoints of, ascending."""
        return sorted(int(p.stem.rpartition("-")[2]) for p in self.checkpoints.glob("round-*"))

    def best_round(self) -> int | None:
        """The round that the run's models are of, where the best is kept; None for the last."""
        return self.summary().get("best_round") if self.summary_file.exists() else None

    def progress(self, number: int | None = None) -> Progress | None:
        """The state after round `number`, or after the last one; None before the first.

        Raises:
            RunError: there is no such checkpoint, or it is damaged.
        """
        rounds = self.rounds()
        if number is None and not rounds:
            return None
        wanted = rounds[-1] if number is None else number
        if wanted not in rounds:
            raise RunError(
                f"{self.path} has no checkpoint of round {wanted}, only of {rounds or 'none'}; "
                "keep them with keep_checkpoints = 'all', or the best with 'best'"
            )
        path = self._checkpoint(wanted)
        try:
            stored = dense(decode(path.read_bytes()))
            if "correct" in stored:
                raise RunError(
                    f"{path} is of fedbayes 0.1, whose runs this version cannot go on with; use "
                    "fedbayes 0.1 for it, or start a new run. Its model and summary can be read"
                )
            return unpack(Progress, stored)
        except (OSError, MessageError) as error:
            raise RunError(f"the checkpoint {path} is damaged: {error}") from None

    def add_metrics(self, metrics: Metrics) -> None:
        """Append the line of a round to `metrics.jsonl`."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def metrics(self) -> list[Metrics]:
        """The lines of all rounds; a last line that was cut off by a kill is left out.

        Raises:
            RunError: a line is damaged.
        """
        if not self.metrics_file.exists():
            return []
        whole = []
        for number, line in enumerate(self.metrics_file.read_text().split("\n")[:-1], start=1):
            try:
                whole.append(_table(line))
            except ValueError as error:
                raise RunError(
                    f"{self.metrics_file}, line {number} is damaged: {error}; remove it"
                ) from None
        return whole

    def drop_metrics_after(self, number: int) -> None:
        """Forget the lines of rounds that did not complete."""
        kept = [line for line in self.metrics() if line["round"] <= number]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_beside(self.metrics_file, text.encode())

    def reopen(self) -> None:
        """Remove what an interrupted run left at its end: it is no longer so once rounds follow."""
        self.summary_file.unlink(missing_ok=True)
        self.model_file.unlink(missing_ok=True)

    def finish(self, model: Tensors | None, summary: Metrics, card: Card) -> None:
        """Write the summary, and the global model with its card if there is one."""
        if model is not None:
            data = encode(dict(model), plain=True, metadata={CARD: card.dump()})
            write_beside(self.model_file, data)
        write_beside(self.summary_file, (json.dumps(summary, indent=2) + "\n").encode())

    def model(self) -> Tensors:
        """The global model at the end.

        Raises:
            RunError: the run has not ended, its method has no global model, or the file is
                damaged.
        """
        if self.summary_file.exists() and not self.model_file.exists():
            method = self.config().build_method()
            if not method.has_global_model:
                raise RunError(
                    f"{self.path} has no global model: under {method.name} only clients have "
                    "models of their own"
                )
        try:
            return dense(decode(self.model_file.read_bytes()))
        except (OSError, MessageError) as error:
            raise RunError(f"cannot read the model of {self.path}: {error}") from None

    def summary(self) -> Metrics:
        """What came of the run.

        Raises:
            RunError: the run has not ended.
        """
        try:
            return _table(self.summary_file.read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} has no summary yet: {error}") from None


def _table(text: str) -> Metrics:
    """A table in JSON.

    Raises:
        ValueError: it is invalid.
    """
    table: Metrics = json.loads(text)
    if not isinstance(table, dict):
        raise ValueError("it is no table")
    return table


def first_progress(server: Tensors, clients: int, constants: str) -> Progress:
    """The state before the first round."""
    stored = torch.zeros(clients, dtype=torch.int64)
    return Progress(0, server, ClientScores.none(clients), stored, constants=constants)
