"""Forget a client that withdraws: a new run that continues without it.

There are three ways, and a run takes the first that its method allows:

- `factor` divides the client's factor out of the posterior (`Method.forget`). Rounds without the
  client then move the other factors to where they belong.
- `checkpoint` starts rounds again from the last checkpoint before the client's first update.
- `start` starts rounds again from the beginning, as if the client had never been there.

The new run is made in a hidden folder, which is renamed once its first state is complete. From then
on it resumes like any run. Its `forgotten.json` lists what was removed, and what cannot be.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation, Method, Reports, Stateless
from fedbayes.core.files import json_text, parse_json, read_text, write_beside
from fedbayes.core.tensors import pack, unpack
from fedbayes.core.wording import listed
from fedbayes.data import FederatedData, Partition, Preprocessing, load_dataset
from fedbayes.data.frame_files import FILE, without_rows
from fedbayes.data.sources.tables import client_files
from fedbayes.errors import RunError
from fedbayes.federation.client_runtime import read_state, write_state
from fedbayes.federation.engine_table import ENGINES
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.runs.simulation import Simulation
from fedbayes.start import Listener, either
from fedbayes.storage.activity import Notify, unnoticed
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.private_states import ClientStates
from fedbayes.storage.progress import Progress
from fedbayes.storage.scores import ClientScores
from fedbayes.workflows.running import Result, complete

FORGOTTEN_FILE = "forgotten.json"
"""What was removed from a run, in its folder."""
ROUNDS = 10
"""Rounds without the client once its factor is removed, unless said otherwise."""

Way = Literal["factor", "checkpoint", "start"]


@dataclass(frozen=True)
class Forgotten:
    """What was removed from a run with a client, and what cannot be."""

    client: str
    """Its name."""
    run: str
    """The folder of the run that it was in."""
    way: Way
    """How it was removed; see the module."""
    round: int
    """The round of that run whose state the new one began with."""
    rounds: int
    """Rounds that follow without the client, as they were planned."""
    removed: tuple[str, ...]
    """What the new run no longer has, in words."""
    remains: tuple[str, ...]
    """What cannot be removed, or lies elsewhere, in words."""
    earlier: tuple[str, ...] = ()
    """Clients that were removed before it, of whom as much remains."""

    def lines(self) -> list[str]:
        """All of it, a line each."""
        return [
            f"forgot {self.client} of {self.run}",
            *(f"left out: {text}" for text in self.removed),
            *(f"remains: {text}" for text in self.remains),
        ]


def forgotten(folder: Path | str) -> Forgotten:
    """Read what was removed from a run that `forget` made.

    Raises:
        RunError: no client was, or the file is damaged.
    """
    path = Path(folder) / FORGOTTEN_FILE
    try:
        told = parse_json(read_text(path))
        lists = {name: tuple(told.get(name, ())) for name in ("removed", "remains", "earlier")}
        return Forgotten(**{**told, **lists})
    except FileNotFoundError:
        raise RunError(
            f"{folder} has no {FORGOTTEN_FILE}, so no client was removed from it"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is damaged: {error}") from None


def forget(
    run: "Result | RunFolder | Path | str",
    client: str | int,
    folder: Path | str | None = None,
    *,
    out: Path | str | None = None,
    rounds: int | None = None,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **objects: Any,
) -> "Result":
    """Make a run without a client that withdraws, and run it to its end.

    The run itself stays as it is. Under methods whose posterior is a product of factors, the
    client's factor is divided out in closed form, and a few rounds follow without the client. Other
    methods start again, from the last checkpoint without the client if one was kept.

    Args:
        run: the run, or its folder.
        client: its name, or its number.
        folder: of the new run; a temporary one if None.
        out: the same by the name that it has on the command line.
        rounds: rounds without the client. None: 10 where its factor is divided out, or as many as
            the run had since the state that training starts again from.
        listener: as for `fedbayes.run`.
        track: as for `fedbayes.run`.
        progress: as for `fedbayes.run`.
        **objects: Python objects that the run was given, as for `fedbayes.resume`.

    Returns:
        The new run. `forgotten.json` in its folder says what was removed, and what cannot be.

    Raises:
        FedbayesError: there is no such client, it is the only one, its factor is at a node, or the
            folder is not free.

    Examples:
        >>> import fedbayes
        >>> run = fedbayes.run(method="pvi", clients=3, rounds=2, model={"hidden": [8]})
        >>> new = fedbayes.forget(run, "client-0", out="without", rounds=1)
        >>> new.summary["clients"]
        2
    """
    before = Path(run.folder if isinstance(run, Result) else run)
    place, keep = either(folder=folder, out=out), None
    if place is None:
        keep = tempfile.TemporaryDirectory(prefix="fedbayes-")
        place = Path(keep.name) / "run"
    new = Path(place)

    def start(notify: Notify) -> Simulation:
        begin(before, client, new, rounds, notify=notify, **objects)
        return Simulation(None, new, notify=notify)

    complete(start, listener, track, progress)
    return Result(new, keep)


def begin(
    run: Path,
    client: str | int,
    out: Path,
    rounds: int | None = None,
    *,
    notify: Notify = unnoticed,
    **objects: Any,
) -> Forgotten:
    """Make the folder of the new run, whole or not at all; no round follows yet.

    Args:
        run: the folder of the run that the client was in.
        client: its name, or its number.
        out: the new folder.
        rounds: as for `forget`.
        notify: called with the name of each step that takes long.
        **objects: as for `forget`.

    Raises:
        FedbayesError: as for `forget`.
    """
    if run.is_file():
        raise RunError(
            f"{run} is a file. To remove a client from a fused model, run fedbayes fuse again "
            "without the client's file"
        )
    RunFolder(run).give_objects(objects)
    withdrawal = Withdrawal.open(RunFolder(run), client)
    RunFolder(out).require_vacant()
    if run.resolve() in out.resolve().parents:
        raise RunError(f"{out} is inside of {run}, which you delete later. Choose another folder")
    if out.exists() and next(out.iterdir(), None) is not None:
        raise RunError(f"{out} is not empty. Give a new folder")
    with _renamed_when_whole(out) as beside:
        found = withdrawal.write(beside, out, rounds, notify)
        write_beside(beside / FORGOTTEN_FILE, (json_text(asdict(found), indent=2) + "\n").encode())
    RunFolder(out).know_objects(withdrawal.config)
    return found


@contextmanager
def _renamed_when_whole(out: Path) -> Iterator[Path]:
    """A hidden folder next to another, which takes its name when the block ends without error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)  # of a process of this number that was killed
    beside.mkdir()
    try:
        yield beside
        beside.replace(out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


@dataclass(frozen=True)
class Withdrawal:
    """A client of a run that is to be removed, and the way to do it."""

    folder: RunFolder
    config: Config
    method: AnyMethod
    division: Partition
    client: int
    """Its number."""
    way: Way
    progress: Progress | None
    """The state that the new run begins with; None: the start."""

    @classmethod
    def open(cls, folder: RunFolder, client: str | int) -> Self:
        """A client of a run.

        Raises:
            RunError: there is none, it is the only one, or the run is not one to remove it from.
        """
        folder.require_run()
        folder.refuse_while_locked()
        folder.refuse_changed_config()
        config = folder.config()
        method = config.build_method()
        if config.data.generator is not None:
            raise RunError(
                f"{folder} gets its clients' rows from the function {config.data.generator}. "
                "Leave the client out there, and start a new run"
            )
        if (place := ENGINES[config.engine].states) == "remote":
            raise RunError(
                f"the clients of {folder} are nodes of a network, which keep their own factors. "
                "Start a new federation without the client's node"
            )
        number = folder.find_client(client)
        division = folder.partition()
        if division is None:
            raise RunError(f"{folder} has no partition yet: it had no round to forget")
        if division.clients < 2:
            raise RunError(f"{division.names[number]} is the only client of {folder}")
        progress = folder.progress(folder.best_round())
        if progress is None:
            raise RunError(f"{folder} has had no round yet, so there is nothing to forget")
        exact = type(method).forget is not Method.forget and not config.privacy.noise
        if exact and place == "run" and not config.attack.active:
            return cls(folder, config, method, division, number, "factor", progress)
        if earlier := _last_without(folder, config, method, number):
            return cls(folder, config, method, division, number, "checkpoint", earlier)
        return cls(folder, config, method, division, number, "start", None)

    @property
    def name(self) -> str:
        """The client's name."""
        return self.division.names[self.client]

    def write(self, place: Path, out: Path, rounds: int | None, notify: Notify) -> Forgotten:
        """Write the new run up to the state that its rounds start from.

        Args:
            place: an empty folder.
            out: the name that it gets.
            rounds: as for `forget`.
            notify: called with the name of each step that takes long.
        """
        more = self._rounds(rounds)
        data = stored_data(self.config, self.folder, changed="refuse")
        config = self._settings(more if self.progress is None else 1 + more)
        division = self.division.without([self.name])
        preprocessing = self.folder.preprocessing()
        if preprocessing is None:
            raise RunError(f"{self.folder} has no {self.folder.preprocessing_file.name}")
        if config.data.keep:
            config, division, preprocessing = self._without_rows(config, preprocessing)
        odd = False
        if self.progress is None:
            with Simulation(config.reopened(), place, notify=notify):
                pass
        else:
            RunFolder(place).know_objects(config)
            RunFolder(place).create(config, division, preprocessing)
            odd = self._adopt(self.progress, place, notify)
        done = 0 if self.progress is None else self.progress.round
        return Forgotten(
            self.name,
            str(self.folder),
            self.way,
            done,
            more,
            self._removed(),
            self._remains(self._only_own(data), odd=odd),
            self._earlier(),
        )

    def _rounds(self, rounds: int | None) -> int:
        """Rounds that follow."""
        if rounds is None and self.way == "factor":
            return ROUNDS
        done = 0 if self.progress is None else self.progress.round
        wanted = max(1, self.config.rounds - done) if rounds is None else rounds
        least = 1 if self.progress is None else 0
        if wanted < least:
            raise RunError(
                f"rounds is {wanted}, but training starts again from the beginning. Give 1 or more"
            )
        return wanted

    def _settings(self, rounds: int) -> Config:
        """The settings of the new run."""
        config, left = self.config, self.division.clients - 1
        data = config.data
        if not data.keep:
            data = data.model_copy(update={"exclude": (*data.exclude, self.name)})
        most = config.clients_per_round
        return config.model_copy(
            update={
                "data": data,
                "rounds": rounds,
                "clients_per_round": None if most is None else min(most, left),
            }
        )

    def _without_rows(
        self, config: Config, preprocessing: Preprocessing
    ) -> tuple[Config, Partition, Preprocessing]:
        """The same with a copy of the data that lacks the client's rows, whose others move up."""
        path, name = config.data.path, self.name
        assert path is not None
        before = load_dataset(self.config.data, self.config.target_kinds)
        if before.groups is not None:
            gone = before.groups == before.group_names.index(name)
        else:
            rows = (self.division.train_rows(self.client), self.division.test_rows(self.client))
            gone = np.isin(np.arange(before.samples), np.concatenate(rows))
        whole = before.groups is not None or self.way != "start"
        reduced = without_rows(path, gone) if whole and path.suffix == Path(FILE).suffix else None
        if reduced is None:
            raise RunError(
                f"the copy of the data in {self.folder} has the rows of {name}, and rows can be "
                "removed only from a DataFrame with a group column. Start a new run on data "
                "without them"
            )
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"path": reduced})}
        )
        after = load_dataset(config.data, config.target_kinds)
        kept = np.flatnonzero(~gone)
        if after.samples != len(kept) or not np.array_equal(after.y, before.y[kept]):
            raise RunError(
                f"without the rows of {name} the data of {self.folder} change in other ways, such "
                "as their classes. Start a new run on data without them"
            )
        place = np.cumsum(~gone) - 1
        division = self.division.without([name])
        division = replace(division, train=place[division.train], test=place[division.test])
        preprocessing = replace(preprocessing, samples=after.samples, digest=after.digest)
        return config, division, preprocessing

    def _adopt(self, progress: Progress, place: Path, notify: Notify) -> bool:
        """Start the new run without the client; whether its posterior was no product of factors."""
        preprocessing = self.folder.preprocessing()
        assert preprocessing is not None
        run = stored_run(self.folder, self.config, preprocessing)
        server: Any = unpack(self.method.server_state, progress.server)
        states: dict[int, bytes] = {}
        odd = False
        if self.way == "factor":
            server, states, odd = self._without(server, progress, run)
        scores = ClientScores(progress.clients.table.without(self.client))
        weights = progress.weights.without(self.client)
        with Simulation(None, place, notify=notify) as simulation:
            if simulation.data.dataset.permuted:
                raise RunError(
                    f"the pixel order of each client of {self.folder} depends on its number, and "
                    "numbers change without this client. Start a new run without it"
                )
            simulation.adopt(server, states, replace(progress, clients=scores, weights=weights))
        return odd

    def _without(
        self, server: Any, progress: Progress, run: Federation
    ) -> tuple[Any, dict[int, bytes], bool]:
        """The states without the client, and whether all factors leave more than the prior."""
        whole = emptied = server
        states = ClientStates(self.folder.clients, progress.states)
        device = torch.device("cpu")
        if self.client in states:
            gone, _ = read_state(states[self.client], self.method, device)
            server = emptied = self.method.forget(server, gone, run)
        others: dict[int, bytes] = {}
        for client in states:
            if client == self.client:
                continue
            state, unsaid = read_state(states[client], self.method, device)
            emptied = self.method.forget(emptied, state, run)
            state = self.method.remaining(state, run, self.division.clients - 1)
            others[client - (client > self.client)] = write_state(state, unsaid)
        return server, others, _differ(emptied, self.method.init(run), whole)

    def _removed(self) -> tuple[str, ...]:
        """What the new run does not have, in words."""
        name, run = self.name, self.folder
        first = {
            "factor": f"the factor of {name} in the posterior, divided out in closed form",
            "checkpoint": f"every update of {name}: training starts again from the checkpoint of "
            f"round {0 if self.progress is None else self.progress.round}, before its first one",
            "start": f"every update of {name}: training starts again from the beginning",
        }[self.way]
        return (
            first,
            f"the private state of {name}, and the checkpoints and metric lines of {run}",
            f"the rows of {name} from training, tests and calibration"
            + (", and from the copy of the data" if self.config.data.keep else ""),
        )

    def _earlier(self) -> tuple[str, ...]:
        """Clients that were removed before, and are part of the state that rounds start from."""
        if self.way == "start" or not (self.folder.path / FORGOTTEN_FILE).exists():
            return ()
        before = forgotten(self.folder.path)
        return () if before.way == "start" else (*before.earlier, before.client)

    def _only_own(self, data: FederatedData) -> list[str]:
        """Categories and classes that no other client has, but whose names the new run has."""
        if data.division is None or (self.config.data.keep and self.way == "start"):
            return []
        dataset, others = data.dataset, self.division.without([self.name])
        rows = np.concatenate([others.train, others.test])
        found, place = [], 0
        for column in dataset.columns:
            codes = dataset.x[rows, place] if column.categories else ()
            place += len(column.codes)
            there = set(np.unique(codes).tolist())
            gone = (c for code, c in enumerate(column.categories) if code not in there)
            found += [f"{column.name}={category}" for category in gone]
        there = set(np.unique(dataset.y[rows]).tolist()) if dataset.classes else set()
        return found + [c for code, c in enumerate(dataset.classes) if code not in there]

    def _own(self) -> str:
        """Where the client's rows come from, in words; empty if from no data of the user's own."""
        data = self.config.data
        if not data.more:
            return str(data.path or data.query or "")
        files = client_files((data.path or Path(), *data.more), None)
        # A client of rows of several files has another name than they.
        return str(files.get(self.name) or listed(files.values()))

    def _remains(self, only_own: list[str], *, odd: bool) -> tuple[str, ...]:
        """What cannot be removed, or lies elsewhere, in words."""
        name, run, config = self.name, self.folder, self.config
        every = listed((*self._earlier(), name))
        found = [
            f"{run} still has all of it. Delete the folder and its copies",
            f"copies of models, predictions and reports of {run} that others have",
        ]
        if (own := self._own()) and not config.data.keep:
            found.append(
                f"the rows of {name} in {own}. Delete them there. The new run then still "
                "predicts, but does not resume or evaluate"
            )
        if config.data.summaries:
            found.append(
                f"the sums in data.summaries, if one of the files belongs to {name}: columns are "
                "encoded with them"
            )
        if only_own:
            found.append(
                "names of categories and classes that no client of the new run has: "
                f"{listed(only_own)}"
            )
        if config.privacy.noise:
            found.append(
                f"the privacy loss of the other clients: both runs train on their rows, so epsilon "
                f"of {run} and that of the new run add up"
            )
        if self.way == "factor":
            found.append(
                f"the other clients' factors were trained together with {every}. Rounds that "
                "follow move them toward what retraining from the beginning gives"
            )
        if odd:
            found.append(
                f"the posterior of {run} is not the product of its clients' factors, because "
                f"updates were bounded (aggregation). Some influence of {name} remains; only a "
                "new run removes it"
            )
        if self.way != "start":
            found.append(f"the means and SDs of the data count the training rows of {every}")
            if config.settings_chosen:
                found.append(
                    f"settings that were chosen automatically with {every}: "
                    f"{', '.join(config.settings_chosen)}"
                )
        return tuple(found)


_ROUNDING = 1e-3
"""Part of a state by which the product of factors may differ from it, as float32 is sent."""


def _differ(found: Any, wanted: Any, whole: Any) -> bool:
    """Whether two states differ by more than rounding, measured by a third."""
    one, other, scale = pack(found), pack(wanted), pack(whole)
    return any(
        bool((t.cpu() - other[name].cpu()).abs().max() > _ROUNDING * scale[name].abs().max())
        for name, t in one.items()
        if t.is_floating_point() and t.numel()
    )


def _last_without(
    folder: RunFolder, config: Config, method: AnyMethod, client: int
) -> Progress | None:
    """The last checkpoint that shows itself to be before a client's first update."""
    reports = Reports.of(method)
    shown = reports.weighted and not config.secure.enabled and not config.privacy.noise
    if method.client_state is not Stateless or reports.pooled or not shown:
        return None
    for number in reversed(folder.rounds()):
        progress = folder.progress(number) if number else None
        if progress is not None and progress.weights.row(client) is None:
            return progress
    return None
