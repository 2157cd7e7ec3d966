"""Try all that a hostile client, a kill or a damaged file can do, and print what survived.

    python -m tests.hostile            # under an hour on two cores
    python -m tests.hostile --quick    # about a minute

Each part is a function of how many to try and a seed, the number of the first of them. It gives how
many it tried and how many survived, what failed in words, and if it likes its worst figures by
unit.
"""

import argparse
import os
import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.hostile.attacks import CASES
from tests.hostile.trying import Part, run

PARTS = [
    Part("messages and reports", "tests.hostile.messages:fuzz", 1_000_000, 15_000, 2_500),
    Part("kills", "tests.hostile.kills:attack", 1_000, 10, 50),
    Part("damaged folders", "tests.hostile.folders:attack", 1_000, 20, 100),
    Part("lies in sums", "tests.hostile.sums:attack", 20_000, 700, 700),
    Part("files of strangers", "tests.hostile.files:attack", 2_000, 42, 14),
    Part("kills of commands", "tests.hostile.commands:attack", 40, 4, 4),
    Part("attacks", "tests.hostile.attacks:attack", len(CASES), 1, 1),
]


def shown(accounts, wanted):
    """The table."""
    table = Table(title="Tried and survived")
    for name in ("part", "tried", "of", "survived", "processor min", "worst"):
        table.add_column(name, justify="left" if name in ("part", "worst") else "right")
    for name, account in accounts.items():
        most, lost = wanted[name], account.tried - account.survived
        table.add_row(
            name,
            f"{account.tried:,}",
            f"{most:,}",
            f"[red]{account.survived:,}[/]" if lost else f"{account.survived:,}",
            f"{account.seconds / 60:.1f}",
            ", ".join(f"{figure:.3g} {unit}" for unit, figure in account.worst.items()),
        )
    return table


def main(arguments=None):
    """Read the command line; the status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--minutes", type=float, default=55, help="after which nothing is begun")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--seed", type=int, default=0, help="other ones to try")
    parser.add_argument("--only", metavar="WORD", default="", help="parts with this in their name")
    given = parser.parse_args(arguments)
    counts = {part: part.few if given.quick else part.count for part in PARTS}
    parts = {part: n for part, n in counts.items() if n and given.only in part.name}
    wanted = {part.name: count for part, count in parts.items()}
    console = Console()
    with console.status("begins") as status:
        start = time.monotonic()
        accounts = run(
            parts,
            jobs=given.jobs,
            seed=given.seed,
            minutes=given.minutes,
            tell=lambda found: status.update(
                ", ".join(f"{name} {account.tried:,}" for name, account in found.items())
            ),
        )
    console.print(shown(accounts, wanted))
    failures = [(name, why) for name, account in accounts.items() for why in account.failures]
    for name, why in failures[:20]:
        console.print(f"[red]{name}[/]: {escape(why[-600:])}")
    if len(failures) > 20:
        console.print(f"and {len(failures) - 20:,} more")
    console.print(f"{(time.monotonic() - start) / 60:.1f} minutes, {given.jobs} processes")
    sound = all(account.tried == account.survived for account in accounts.values())
    whole = all(account.tried >= wanted[name] for name, account in accounts.items())
    if not whole:
        console.print("not all was tried in the time")
    return 0 if sound and whole else 1


if __name__ == "__main__":
    sys.exit(main())
