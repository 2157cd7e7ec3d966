"""What went wrong with which client, of all rounds of some runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedbayes.reports.gather import Record

KINDS = {
    "refused": "report rejected",
    "lost": "no report received",
    "troubles": "reported after trouble",
    "outliers": "outlier",
}
"""Entries of a round's line by client, in words."""


@dataclass(frozen=True)
class Trouble:
    """What went wrong with a client again and again."""

    run: int
    client: str
    what: str
    """In words, a value of `KINDS`."""
    reason: str
    """Why, in its last round."""
    last: int
    """The last round that it was so."""
    times: int
    """In how many rounds it was."""


def troubles(records: Sequence[Record]) -> list[Trouble]:
    """What went wrong with clients, the newest first."""
    found: dict[tuple[int, str, str], Trouble] = {}
    for run, record in enumerate(records):
        for line in record.metrics:
            for kind, words in KINDS.items():
                for client, reason in line.get(kind, {}).items():
                    before = found.get((run, client, kind))
                    found[run, client, kind] = (
                        Trouble(run, _name(record, client), words, reason, line["round"], 1)
                        if before is None
                        else replace(
                            before, reason=reason, last=line["round"], times=before.times + 1
                        )
                    )
    return sorted(found.values(), key=lambda one: (-one.last, one.run))


def _name(record: Record, client: str) -> str:
    """The name of a client whose number stands in the line of a round."""
    number = int(client) if client.isdecimal() else len(record.clients)
    return record.clients[number] if number < len(record.clients) else f"client {client}"
