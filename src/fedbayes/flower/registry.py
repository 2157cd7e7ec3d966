"""Who is registered at a SuperLink: the nodes that it knows, and what they say of themselves."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedbayes.errors import EngineError, warn
from fedbayes.flower.poller import Poller
from fedbayes.flower.project import hello_files
from fedbayes.flower.roster import Roster
from fedbayes.flower.superlink import Submission, SuperLink
from fedbayes.flower.wire import one_line

_CLIENTS = 2**31
"""More than there are: whatever number a node says is taken as it is."""
_POLL = 0.2
"""Seconds between two looks for answers."""


@dataclass(frozen=True)
class Registered:
    """A node that a SuperLink knows."""

    node: int
    name: str
    """That it was admitted under; empty if it was not."""
    status: str
    """Flower's word: registered (and never seen), online, offline, unregistered."""
    registered: datetime | None
    last_seen: datetime | None
    """The last heartbeat that was waited for; None if it never connected."""
    client: int | None = None
    """Which client it says that it is; None if it was not asked, or has not answered."""
    versions: dict[str, str] = field(default_factory=dict)
    """On what it says that it runs."""
    trouble: str = ""
    """Why it is no client, in its own words, or why nothing is known of it."""


def registered(link: SuperLink, ask: float) -> list[Registered]:
    """The nodes of a SuperLink, in the order in which they were registered.

    Args:
        link: the SuperLink.
        ask: seconds to ask those that are online which client they are; 0 to ask none.

    Raises:
        EngineError: the SuperLink cannot be reached.
    """
    nodes = sorted(link.nodes(), key=lambda node: (node.registered_at, node.node_id))
    online = {node.node_id for node in nodes if node.status == "online"}
    if not ask or not online:
        return [_row(node) for node in nodes]
    submission = Submission(link, hello_files())
    try:
        roster = introduced(submission.connect, online, ask)
    except EngineError as error:
        note = f"nodes did not report their client: {error}"
        warn(note)
        return [_row(node) for node in nodes]
    finally:
        submission.close(completed=True)
    rows = []
    for node in nodes:
        hello, trouble = roster.hellos.get(node.node_id), roster.troubles().get(node.node_id, "")
        if hello is None and not trouble and node.node_id in online:
            trouble = f"no answer within {ask:g} s"
        rows.append(
            _row(
                node,
                None if hello is None else hello.client,
                {} if hello is None else hello.versions,
                trouble,
            )
        )
    return rows


def introduced(connect: Callable[[], Grid], nodes: set[int], seconds: float) -> Roster:
    """A roster whose nodes were asked who they are, until all of these have answered."""
    roster = Roster(Poller(connect), _CLIENTS, seconds, compare=False)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        roster.discover()
        if nodes <= roster.hellos.keys() | roster.troubles().keys():
            break
        time.sleep(_POLL)
    return roster


def _row(
    node: NodeInfo,
    client: int | None = None,
    versions: dict[str, str] | None = None,
    trouble: str = "",
) -> Registered:
    seen = [
        time for at in (node.last_activated_at, node.last_deactivated_at) if (time := _time(at))
    ]
    now = datetime.now(UTC)
    return Registered(
        node.node_id,
        one_line(node.name)[:100],
        one_line(node.status),
        _time(node.registered_at),
        now if node.status == "online" else max(seen, default=None),
        client,
        versions or {},
        trouble,
    )


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return None
