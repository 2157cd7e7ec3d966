"""A feature of a round that a user adds: what a client and the server do with a report.

    class Rounded(Stage):
        def client(self, report, message, at):
            return Report({n: t.half().to(t) for n, t in report.tensors.items()}, report.weight)

`stages = ["package.module:Rounded"]` in a config puts it into every round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedbayes.contracts import Report, RoundContext
from fedbayes.core.lazy import own_class, own_code
from fedbayes.core.messages import Message
from fedbayes.errors import ConfigError

if TYPE_CHECKING:
    from fedbayes.federation.broadcast import ServerMessages
    from fedbayes.federation.ledger import Ledger


@dataclass(frozen=True)
class Arrival:
    """A proper report of a client.

    Examples:
        >>> from fedbayes.contracts import Report
        >>> from fedbayes.federation.stages.stage import Arrival
        >>> Arrival(3, Report({}, 20.0), None).client
        3
    """

    client: int
    report: Report
    broadcast: "ServerMessages"
    """What its client started from."""


class Stage:
    """Both ends do nothing by default; define one of them, or both.

    Examples:
        >>> from dataclasses import replace
        >>> from fedbayes.contracts import Report
        >>> from fedbayes.federation.stages.stage import Stage
        >>> class Heavier(Stage):
        ...     def client(self, report, message, at):
        ...         return replace(report, weight=2 * report.weight)
        >>> Heavier().client(Report({}, 3.0), {}, None).weight
        6.0
    """

    def client(self, report: Report, message: Message, at: RoundContext) -> Report:
        """The report that the client sends, before it is compressed.

        Args:
            report: of the method.
            message: what the server sent.
            at: client and round.
        """
        return report

    def server(self, arrivals: Iterator[Arrival], ledger: "Ledger") -> Iterator[Arrival]:
        """The reports that pass on, to bounds and to the update.

        Args:
            arrivals: proper reports, one by one in the order of the cohort.
            ledger: `ledger.refuse(client, reason)` rejects a client that does not pass on.
        """
        return arrivals


def find_stages(places: Sequence[str]) -> tuple[Stage, ...]:
    """The stages of a config, in their order.

    Raises:
        ConfigError: one is no class, it derives from something else, does nothing or cannot be
            made.
    """
    return tuple(_made(place) for place in places)


def _made(place: str) -> Stage:
    kind = own_class(place, Stage, "stage")
    with own_code(ConfigError, f"the stage {place!r} cannot be made without arguments", place):
        made: Stage = kind()
    if (kind.client, kind.server) == (Stage.client, Stage.server):
        raise ConfigError(f"the stage {place!r} does nothing. Define client, server or both")
    return made


def at_client(
    stages: Sequence[Stage], report: Report, message: Message, at: RoundContext
) -> Report:
    """The report that a client sends. A ConfigError names a stage that fails, or gives none."""
    for stage in stages:
        kind = type(stage)
        failed = f"the stage {kind.__name__} failed at client {at.client}"
        with own_code(ConfigError, failed, kind.__module__):
            report = stage.client(report, message, at)
        if not isinstance(report, Report):
            raise ConfigError(
                f"the stage {kind.__name__} returns a {type(report).__name__} from client. Return "
                "a Report"
            )
    return report


def at_server(
    stages: Sequence[Stage], arrivals: Iterator[Arrival], ledger: "Ledger"
) -> Iterator[Arrival]:
    """The reports that all stages let pass. Raises a ConfigError if a stage returns no iterator."""
    for stage in stages:
        arrivals = stage.server(arrivals, ledger)
        if not isinstance(arrivals, Iterator):
            raise ConfigError(
                f"the stage {type(stage).__name__} returns a {type(arrivals).__name__} from "
                "server. Yield the arrivals to keep"
            )
    return arrivals
