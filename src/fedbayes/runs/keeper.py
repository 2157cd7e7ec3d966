"""What of a run stays on the disk: its last state, the best one or all, and what these need."""

from collections.abc import Sequence

from fedbayes.config.config import Config
from fedbayes.core.by_client import ByClient
from fedbayes.errors import warn
from fedbayes.runs.turns import states_needed
from fedbayes.storage.best_tracker import BestTracker
from fedbayes.storage.flusher import Flusher
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.metrics_file import Metrics
from fedbayes.storage.private_states import ClientStates
from fedbayes.storage.progress import Progress
from fedbayes.storage.server_history import ServerHistory


class Keeper:
    """The checkpoints of one run, and which of its rounds is the best.

    Args:
        config: of the run.
        folder: of the run.
        versions: states of the server that clients are at work from.
        standing: which round was the best, before there was one.
    """

    def __init__(
        self, config: Config, folder: RunFolder, versions: ServerHistory, standing: BestTracker
    ) -> None:
        self._config, self._folder, self._versions = config, folder, versions
        self._standing, self._flusher = standing, Flusher()
        self._states: ClientStates
        self._all = config.keep_checkpoints == "all"
        self._keeps_best = config.keep_checkpoints == "best"
        self.saved = 0
        """The round of the newest checkpoint."""
        self.best: Progress | None = None
        """The state after the best round so far, where its checkpoint is kept."""

    def take_up(self, saved: int, lines: Sequence[Metrics]) -> None:
        """Go on after the newest checkpoint, of the round `saved`, with the lines of metrics up to
        it.
        """
        self.saved, self._standing = saved, self._standing.after_all(lines)
        if self._keeps_best:
            self._take_up_best(lines)

    def _take_up_best(self, lines: Sequence[Metrics]) -> None:
        """Take up the best round whose checkpoint is kept; say so where there was a better one."""
        kept, known = self._folder.rounds(), self._folder.inventory()
        if "keep_checkpoints" not in self._folder.config_changes():
            kept = [known.best] if known is not None and known.best else []
        if kept:
            before = self._standing.best_round
            self._standing = self._standing.best_among(
                line for line in lines if line["round"] in kept
            )
            now = self._standing.best_round
            if now != before:
                warn(
                    f"the checkpoint of round {before}, the best so far, was not kept. Round "
                    f"{now or self.saved} counts as the best until there is a better one"
                )
        if self._standing.best_round:
            self.best = self._folder.progress(self._standing.best_round)

    def take_states(self, states: ClientStates) -> None:
        """Remove private states of clients that no checkpoint names."""
        self._states = states
        states.remove_strays(keep_older=self._all, best=self._states_of_best)

    def record(self, progress: Progress, metrics: Metrics) -> None:
        """Write a checkpoint where one is due.

        Args:
            progress: the state after the round that has just ended.
            metrics: its line.
        """
        self._standing = self._standing.after(metrics)
        best = self._keeps_best and self._standing.best_round == progress.round
        if best:
            self.best = progress
        if best or progress.round % self._config.checkpoint_every == 0:
            self.checkpoint(progress)

    def checkpoint(self, progress: Progress) -> None:
        """Make the rounds so far permanent.

        What the last checkpoint names has reached the disk by now. This one goes there during the
        next round, and what only older ones name is removed then. That of a private round is there
        before the next one: what a release spent must be known even after a power cut that follows.
        """
        self._flusher.wait()
        written = self._folder.save(progress, 0 if self.best is None else self.best.round)
        before, self.saved = self.saved, progress.round
        kept = {before, self.saved, *self._best_round}
        older = [] if self._all else self._folder.checkpoints.beside(kept)
        states, retired = self._states.commit(self._states_of_best, keep_older=self._all)
        needed = states_needed(progress.timing)
        versions, past = self._versions.commit(needed, keep_older=self._all)
        self._flusher.start([*written, *states, *versions], [*older, *retired, *past])
        if self._config.privacy.noise:
            self._flusher.wait()

    @property
    def _best_round(self) -> tuple[int, ...]:
        """The round of the best checkpoint, if that is kept."""
        return () if self.best is None else (self.best.round,)

    def tidy(self) -> None:
        """Wait until the last checkpoint is on the disk, and remove what it replaced."""
        self._flusher.wait()
        if not self._all and self.saved:
            older = self._folder.checkpoints.beside({self.saved, *self._best_round})
            states, past = self._states.retire(self._states_of_best), self._versions.retire()
            self._flusher.start([], [*older, *states, *past])
            self._flusher.wait()

    def stands_still(self, line: Metrics) -> bool:
        """Whether the run ends with this round, since the headline metric improves no more."""
        patience = self._config.stop_after
        return patience is not None and self._standing.after(line).waited >= patience

    def close(self) -> None:
        """Wait for what is on its way to the disk."""
        self._flusher.close()

    @property
    def _states_of_best(self) -> ByClient | None:
        """Of each client, the round of its state in the best checkpoint, if that is kept."""
        return None if self.best is None else self.best.states
