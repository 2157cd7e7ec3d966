"""Flower's secure aggregation, SecAgg+: the engine of a server that sees the sum alone.

Keys, shares and rounding are Flower's `SecAggPlusWorkflow`; masks are ours (`secagg_masks.py`). It
was made for Flower's
strategies, so a round is put to it as one: a strategy that hands out our tasks (`_Tasks`), and a
grid of its steps (`SecaggSteps`).

The workflow gives the mean of the reports, of all the clients whose masked reports came. The mean
stands in for each of them, so a round goes on as before: the sum is the same.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Protocol, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.server import LegacyContext
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid

from fedbayes.contracts.changes import reference
from fedbayes.core.messages import decode
from fedbayes.core.tensors import Tensors
from fedbayes.errors import EngineError, FedbayesError, MessageError, warn
from fedbayes.federation.client_runtime import ClientFailure, ClientResult, ClientRuntime, Task
from fedbayes.federation.engines import AtWork
from fedbayes.federation.stages.checks import encode_report
from fedbayes.federation.stages.secure import MODULUS, Plan, Vector, remark_of_mean
from fedbayes.flower.engine import GATHER, Flower
from fedbayes.flower.poller import LinkError
from fedbayes.flower.secagg_masks import with_masks
from fedbayes.flower.secagg_node import write_secure_task
from fedbayes.flower.secagg_steps import DroppedEarly, SecaggSteps
from fedbayes.flower.wire import one_line


class Masking(Protocol):
    """The numbers of secure aggregation, known to server and clients, as `Plan` has them."""

    @property
    def shares(self) -> int:
        """With how many clients one shares its keys."""
        ...

    @property
    def threshold(self) -> int:
        """Clients who must stay until the sum is open."""
        ...

    @property
    def range(self) -> float:
        """Largest absolute value of an entry."""
        ...

    @property
    def levels(self) -> int:
        """Steps from -range to range."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the mean is read in float64."""
        ...


class SecureFlower(Flower):
    """Clients behind a Flower grid, of whose reports the server sees the sum.

    A client that is absent when keys are exchanged is lost for the round. So is a client that drops
    out before its masked report arrives. The sum opens if `plan.threshold` clients stay; if they do
    not, no report of the round counts. A link that breaks ends the run with an error; it can be
    resumed.

    Args:
        plan: the settings.
        connect, runtime, clients, timeout, poll, closing: as for `Flower`.
        apart: whether the clients' data are elsewhere. Then nobody knows before the first round how
            coarse the sum is relative to their weights, and a note says so after that round.
    """

    def __init__(
        self,
        plan: Masking,
        connect: Callable[[], Grid],
        runtime: ClientRuntime | None,
        *,
        clients: int,
        timeout: float,
        poll: float = 0.5,
        closing: Callable[[], None] = lambda: None,
        apart: bool = False,
    ) -> None:
        super().__init__(
            connect, runtime, clients=clients, timeout=timeout, poll=poll, closing=closing
        )
        self._plan, self._untold = plan, apart
        self._present: dict[int, int] = {}  # of the round under way: clients, and their nodes
        self._steps: SecaggSteps | None = None
        self._awaited: tuple[int, ...] = ()

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult | ClientFailure]:
        """Run the protocol; each task's report, in their order, is the mean of all."""
        cohort = {task.client: task for task in tasks}
        self.begin()
        steps = SecaggSteps(self.poller, self.poll, time.monotonic() + self.timeout)
        self._present, self._steps, self._awaited = {}, steps, tuple(cohort)
        try:
            self._present = present = self._gather(cohort)
            self._awaited = ()
            reports, why = self._sum({present[c]: cohort[c] for c in present}, steps)
        except LinkError as error:
            self.start_over()
            raise EngineError(f"the SuperLink was lost: {error}") from None
        finally:
            self._present, self._awaited = {}, ()
        mean = b""
        if reports:
            try:
                (found,) = parameters_to_ndarrays(next(iter(reports.values())).parameters)
                mean = self.read(found, next(iter(cohort.values())))
            except MessageError as error:
                why = str(error)
        for client in cohort:
            node = present.get(client)
            if node is None:
                absent = f"it was not connected for the keys of the round{self.roster.unplaced()}"
                yield ClientFailure(absent)
                continue
            down, up = steps.down.get(node, 0), steps.up.get(node, 0)
            if node in reports and mean:
                ticket = cast(bytes, reports[node].metrics["ticket"])
                size = steps.masked[node]
                yield ClientResult(
                    mean,
                    ticket,
                    {},
                    {},
                    link_down=down,
                    link_up=up,
                    sent=size,
                    exact=self._plan.exact,
                )
            elif node in reports or node not in steps.lost:
                reason = f"secure aggregation failed: {why}"
                yield ClientFailure(reason, down, up, blocked_by_others=True)
            else:
                refused = isinstance(steps.lost[node], MessageError)
                yield ClientFailure(str(steps.lost[node]), down, up, refused)

    def at_work(self) -> AtWork:
        """Who takes part in the protocol, and whose node is away."""
        lost = {} if self._steps is None else self._steps.lost.copy()
        working = tuple(client for client, node in self._present.copy().items() if node not in lost)
        return AtWork(working, away=self.away(dict.fromkeys(self._awaited, "")))

    def _gather(self, cohort: Collection[int]) -> dict[int, int]:
        """Wait for the cohort to connect: the clients that are there, and their nodes."""
        until = time.monotonic() + GATHER * self.timeout
        while True:
            self.roster.discover()
            here = {c: self.roster.nodes[c] for c in cohort if c in self.roster.nodes}
            if len(here) == len(cohort) or time.monotonic() >= until:
                return here
            time.sleep(self.poll)

    def _sum(self, tasks: dict[int, Task], steps: SecaggSteps) -> tuple[dict[int, FitRes], str]:
        """What came of the protocol, with the mean instead of each report; or why nothing."""
        needed = f"{self._plan.threshold} are needed"
        while True:
            left = {node: task for node, task in tasks.items() if node not in steps.lost}
            if len(left) < self._plan.threshold:
                return {}, f"there were {len(left)} clients, {needed}"
            try:
                steps.entries = self.entries(next(iter(left.values())))
                reports = _aggregate(left, self._plan, steps)
            except DroppedEarly:
                continue  # no report was asked for yet: begin again with those that are left
            except FedbayesError:
                raise
            except Exception as error:  # whatever the workflow raises on a stranger's shares
                return {}, f"the masks cannot be removed: {one_line(error)}"
            return reports, "" if reports else f"too few clients stayed to the end, {needed}"

    def entries(self, task: Task) -> int:
        """Length of the vector that a client answers a task with."""
        return 1 + sum(tensor.numel() for tensor in self._centre(task).values())

    def read(self, mean: Vector, task: Task) -> bytes:
        """The mean of the clients' vectors, as the report that stands for each of theirs.

        Raises:
            MessageError: no vectors of honest clients have this mean.
        """
        assert isinstance(self._plan, Plan)
        assert self._runtime is not None
        centre = self._centre(task)
        ranges = self._plan.ranges(self._runtime.method, centre, self._runtime.run)
        report = self._plan.read(mean, centre, ranges)
        if self._untold and (remark := remark_of_mean(self._plan, report.weight)):
            warn(remark)
        self._untold = False
        return encode_report(report)

    def _centre(self, task: Task) -> Tensors:
        """What reports are measured from."""
        assert self._runtime is not None
        return reference(self._runtime.method, decode(task.message), self._runtime.run)


def _aggregate(tasks: dict[int, Task], plan: Masking, steps: SecaggSteps) -> dict[int, FitRes]:
    """Flower's workflow on these tasks, by node: the mean instead of each report, if it opens."""
    strategy = _Tasks({node: write_secure_task(task, plan) for node, task in tasks.items()})
    first = next(iter(tasks.values()))
    state = RecordDict()
    state[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: first.round})
    state[MAIN_PARAMS_RECORD] = ArrayRecord()
    context = Context(0, 0, {}, state, {})
    workflow = _flower().SecAggPlusWorkflow(
        plan.shares if plan.shares < len(tasks) else 1.0,  # 1.0: all
        plan.threshold,
        max_weight=1.0,
        clipping_range=plan.range,
        quantization_range=plan.levels,
        modulus_range=MODULUS,
    )
    workflow(cast(Grid, steps), LegacyContext(context, strategy=strategy))
    return strategy.results


@cache
def _flower() -> ModuleType:
    """Flower's workflow, which takes off our masks."""
    return with_masks("flwr.server.workflow.secure_aggregation.secaggplus_workflow")


class _Tasks(FedAvg):
    """The strategy that Flower's workflow asks for tasks, and tells the mean."""

    def __init__(self, fits: dict[int, FitIns]) -> None:
        super().__init__()
        self._fits = fits
        self.results: dict[int, FitRes] = {}

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """The tasks, by node."""
        nobody = cast(Grid, None)  # the workflow asks a proxy for its number alone
        return [(GridClientProxy(node, nobody, 0), fit) for node, fit in self._fits.items()]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Note the results. They need no aggregation: all hold the mean."""
        self.results = {proxy.node_id: result for proxy, result in results}
        return None, {}
