"""The engine of asynchronous rounds over a network: whose reply comes first reports first."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Any

from fedbayes.errors import EngineError
from fedbayes.federation.client_runtime import ClientFailure, ClientResult, Task
from fedbayes.flower.engine import Flower, PendingTask, _lose_all, _lose_node
from fedbayes.flower.poller import LinkError


class AsynchronousFlower(Flower):
    """Clients behind a Flower grid that stay at work from one round to the next.

    A client has `timeout` seconds for its report, in whichever round they end.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._ready: dict[int, ClientResult | ClientFailure] = {}
        self._given_up_at: dict[int, float] = {}

    def arrivals(
        self,
        reports: int,
        more: Callable[[Set[int]], Iterable[Task]],
        sent: Callable[[Task], object],
    ) -> Iterator[tuple[int, ClientResult | ClientFailure]]:
        """Yield the first `reports` reports, and the failures meanwhile, as they arrive.

        Fewer arrive when the round's time is over. Clients that are at work then continue.

        Args:
            reports: number of reports wanted.
            more: returns the tasks that may start on connected clients; called again and again.
            sent: called with each task when it is sent for the first time.

        Raises:
            EngineError: the SuperLink was lost, or never connected.
        """
        self._resume()
        end, taken = time.monotonic() + self.timeout, 0
        while taken < reports and (self._ready or time.monotonic() < end):
            try:
                self._exchange(more, sent)
            except LinkError as error:
                self._broken(error, end)
            while self._ready and taken < reports:
                client, outcome = next(iter(self._ready.items()))
                taken += not isinstance(outcome, ClientFailure) or outcome.refused
                self._answered = taken
                del outcome  # which may be gigabytes, and is not needed here
                yield client, self._ready.pop(client)
            if taken < reports:
                time.sleep(self.poll)
        self._answered = 0

    def at_hand(self) -> set[int]:
        """Clients that are at work, or whose report waits for the next round."""
        return {*self._pending, *self._ready}

    def forget(self, clients: Collection[int]) -> None:
        """Wait no more for the reports of some clients."""
        for client in clients:
            self._pending.pop(client, None)
            self._ready.pop(client, None)

    def _resume(self) -> None:
        """Begin a round: what was under way in the one before stays so."""
        waited = [each.message_id for each in self._pending.values() if each.message_id]
        self.poller.forget_all_but([*self.roster.asked, *waited])
        self.roster.ask_again()

    def _exchange(
        self, more: Callable[[Set[int]], Iterable[Task]], sent: Callable[[Task], object]
    ) -> None:
        """Send tasks to whoever may start, and take in what was answered."""
        pending, now = self._pending, time.monotonic()
        for node in self.roster.discover():
            _lose_node(node, pending)
        for task in more(self.roster.nodes.keys()):
            pending[task.client] = PendingTask(task)
            self._given_up_at[task.client] = now + self.timeout
        new = [each for each in pending.values() if not each.sent]
        try:
            self._push(pending, now + self.timeout)
        finally:  # a link may break between two of them
            for each in new:
                if each.sent:
                    sent(each.task)
        self._pull(pending, self._ready)
        late = [c for c in pending if time.monotonic() >= self._given_up_at[c]]
        for client in late:
            self._ready[client] = self._given_up(pending.pop(client), self.timeout)

    def _broken(self, error: LinkError, end: float) -> None:
        """Drop a broken grid, so that another is opened and all tasks are sent again."""
        if not self.poller.was_connected:
            raise error
        if time.monotonic() >= end:
            raise EngineError(f"the SuperLink was lost: {error}") from None
        self.start_over()
        _lose_all(self._pending, f"the SuperLink was lost: {error}")
        time.sleep(self.poll)
