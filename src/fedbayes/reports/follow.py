"""Runs followed while they go: read again where something has changed, in moderation.

What rounds tell is read at once, what data and models tell now and then; neither takes more than a
small share of a core from the runs.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedbayes.core.files import SEEDS_FILE, parse_toml, read_text
from fedbayes.errors import FedbayesError
from fedbayes.reports.gather import Record, deepened, labels_of, rounds_of
from fedbayes.reports.now import Now, now, waiting
from fedbayes.reports.page import render
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.heartbeat import Pulse, read_pulse

LOOK = 0.5
"""Seconds between two looks at the folders."""
QUICK, DEEP = 4.0, 15.0
"""How many times the time of the processor that it took to read rounds, or data and models, passes
before they are read again."""


class Follower:
    """Follows runs until it is closed.

    Args:
        folders: run folders, or folders of several seeds; they need not exist yet.

    Raises:
        RunError: a folder holds runs and is none, or is named twice.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._trouble = list(folders), ""
        self._runs: dict[Path, _FollowedRun] = {}
        self._deep = ThreadPoolExecutor(1, thread_name_prefix="fedbayes-report")
        # Of this follower alone: a page that another served is not taken for its own.
        self._begun = time.time_ns()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._page: tuple[object, str] = (None, "")
        self._look()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="fedbayes-follow")
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._over.set()
        self._thread.join()
        self._deep.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict[str, Any]:
        """The current state of the runs, and the version of the page."""
        runs = self._runs
        return {
            "version": self._version(),
            "trouble": self._trouble,
            "runs": [asdict(run.now()) for run in runs.values()],
        }

    def page(self) -> str:
        """The page of the runs in their current state."""
        with self._lock:
            version = self._version()
            if self._page[0] != version:
                records = [run.record for run in self._runs.values() if run.record is not None]
                title = ", ".join(run.label for run in self._runs.values())
                self._page = version, render(records, live=self.state(), title=title)
            return self._page[1]

    def _version(self) -> str:
        """Differs where the page does."""
        runs = self._runs
        versions = (f"{run.label}:{run.version}" for run in runs.values())
        return " ".join([str(self._begun), *versions])

    def _follow(self) -> None:
        while not self._over.wait(LOOK):
            try:
                self._look()
                self._trouble = ""
            except FedbayesError as error:
                self._trouble = str(error)

    def _look(self) -> None:
        """Find the runs, and read again what has changed."""
        found = [run for folder in self._folders for run in runs_in(folder)]
        labels = labels_of(found)
        runs = {}
        for path, label in zip(found, labels, strict=True):
            run = self._runs.get(path)
            if run is None or run.label != label:
                run = _FollowedRun(path, label)
            runs[path] = run
        self._runs = runs
        for run in runs.values():
            run.look(self._deep)


def runs_in(folder: Path) -> list[Path]:
    """The run folders that a folder is or holds; itself where there is nothing yet.

    Raises:
        RunError: it holds runs that are no seeds of one config.
    """
    if RunFolder(folder).config_file.exists():
        return [folder]
    try:
        seeds = parse_toml(read_text(folder / SEEDS_FILE))["seeds"]
        return [folder / f"seed-{seed}" for seed in seeds]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    if begun := sorted(path.parent for path in folder.glob("seed-*/config.toml")):
        return begun
    if any(folder.glob("*/config.toml")):
        RunFolder(folder).require_run()
    return [folder]


class _FollowedRun:
    """One run that is followed."""

    def __init__(self, path: Path, label: str) -> None:
        self.label, self._folder = label, RunFolder(path)
        self.record: Record | None = None
        """What is known of it; None before it began."""
        self.version = 0
        """Grows when that changes."""
        self._trouble = self._deep_trouble = ""
        self._seen: object = None  # the files that rounds are told by, as they were read
        self._known: object = None  # the same, when data and models were
        self._quick_at = self._deep_at = 0.0  # when they may be read again
        self._told: tuple[int, Record] | None = None  # the newest deep record, and its own notes
        self._merged: object = None  # that of them which is shown
        self._under_way: Future[None] | None = None
        self._pulse: Pulse | None = None
        self._beat = time.monotonic()  # when the pulse was seen to change

    def now(self) -> Now:
        """What it is doing."""
        record = self.record
        if record is None:
            first = waiting(self.label, self._folder.path)
            return replace(first, line=self._trouble) if self._trouble else first
        trouble = self._trouble or self._deep_trouble
        return now(record, self._pulse, time.monotonic() - self._beat, trouble)

    def look(self, deep: ThreadPoolExecutor) -> None:
        """Read again what has changed, if it is time."""
        self._take_pulse()
        if not self._folder.config_file.exists():
            if self.record is not None:
                self._trouble = f"{self._folder.config_file} is gone"
            return
        files, moment = self._files(), time.monotonic()
        changed = files != self._seen or self._told is not self._merged
        if changed and moment >= self._quick_at:
            began = time.thread_time()
            self._read_rounds(files)
            self._quick_at = time.monotonic() + QUICK * (time.thread_time() - began)
        busy = self._under_way is not None and not self._under_way.done()
        if self.record is None or busy or self._known == self._seen:
            return
        if time.monotonic() >= self._deep_at or self.record.ending != "so far":
            self._known = self._seen
            self._under_way = deep.submit(self._read_deep)

    def _files(self) -> object:
        """Tells whether what is read has changed."""
        folder = self._folder
        found = []
        for path in (folder.config_file, folder.metrics_file, folder.summary_file):
            try:
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
            except OSError:
                found.append((0, 0, 0))
        return found

    def _take_pulse(self) -> None:
        pulse = read_pulse(self._folder.path)
        if pulse != self._pulse:
            moment = time.monotonic()
            # One that is there at the first look may be old; clocks of other machines differ.
            old = 0.0 if self._pulse or pulse is None else max(0.0, time.time() - pulse.written)
            self._pulse, self._beat = pulse, moment - old

    def _read_rounds(self, files: object) -> None:
        """Read what rounds tell, and show it with the newest that is known of data and models."""
        told = self._told
        try:
            record = rounds_of(self._folder, self.label)
        except FedbayesError as error:
            self._trouble = str(error)
            return
        if told is not None:
            own, known = told
            record = replace(
                known,
                settings=record.settings,
                metrics=record.metrics,
                changed=record.changed,
                ending=record.ending,
                notes=(*record.notes, *known.notes[own:]),
            )
        self._seen, self._merged, self._trouble = files, told, ""
        self.record = record
        self.version += 1

    def _read_deep(self) -> None:
        """Read data and models; in a thread of its own."""
        began = time.thread_time()
        try:
            rounds = rounds_of(self._folder, self.label)
            self._told = len(rounds.notes), deepened(self._folder, rounds)
            self._deep_trouble = ""
        except FedbayesError as error:
            self._deep_trouble = str(error)
        except Exception as error:  # the page goes on with what it has, and says so
            self._deep_trouble = f"data and model cannot be read: {type(error).__name__}: {error}"
        self._deep_at = time.monotonic() + DEEP * (time.thread_time() - began)
