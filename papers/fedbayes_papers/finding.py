"""What an experiment came to: its tables, the paper's claims, and a verdict on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbayes.core.files import write_beside
from fedbayes.errors import RunError
from fedbayes.version import __version__

Scale = Literal["small", "paper"]
"""Minutes to some hours on two cores, or as in the paper."""

FEWEST = 3
"""Seeds that a verdict takes."""

FILE = "finding.json"
"""Where a finding is kept, in the folder of its experiment."""


class Claim(BaseModel):
    """A claim of a paper, whether it was seen here, and what was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    seen: bool
    measured: str
    cause: str = ""
    """Why it was not seen, as far as experiments tell."""

    def __str__(self) -> str:
        line = f"- {'Seen' if self.seen else 'NOT seen'}: {self.text} ({self.measured})."
        return line if self.seen or not self.cause else f"{line} Cause: {self.cause}."


class Part(BaseModel):
    """A table and what it says of the paper's claims."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: str
    """As Markdown."""
    claims: tuple[Claim, ...] = ()
    heading: str = ""
    dataset: str = ""
    """What it was measured on; empty where that is more than one data set."""
    note: str = ""

    def __str__(self) -> str:
        heading = self.heading and f"**{self.heading}**"
        blocks = (heading, self.table, listed(self.claims), self.note)
        return "\n\n".join(block for block in blocks if block)


class Finding(BaseModel):
    """What an experiment came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: str
    scale: Scale
    datasets: tuple[str, ...]
    seeds: int = Field(ge=1)
    """Of the number that has the fewest."""
    parts: tuple[Part, ...]
    note: str = ""
    version: str = __version__

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Those of all parts."""
        return tuple(claim for part in self.parts for claim in part.claims)

    @property
    def verdict(self) -> str:
        """Whether the paper's claims were seen; none from fewer than `FEWEST` seeds."""
        seen, claims = sum(claim.seen for claim in self.claims), len(self.claims)
        if self.seeds < FEWEST:
            plural = "s" * (self.seeds > 1)
            return f"no verdict from {self.seeds} seed{plural} ({seen} of {claims} claims seen)"
        if seen == claims:
            return "seen"
        return "refuted" if not seen else f"seen in part ({seen} of {claims} claims)"

    @property
    def causes(self) -> tuple[str, ...]:
        """Why claims were not seen, where it is known."""
        causes = (claim.cause for claim in self.claims if not claim.seen and claim.cause)
        return tuple(dict.fromkeys(causes))

    def beside(self, before: "Finding | None") -> "Finding":
        """With what was measured on other data sets before, at the same scale and by this version.

        A part of more than one data set is of all of them, and kept with none of them.
        """
        known = (self.experiment, self.scale, self.version)
        if before is None or (before.experiment, before.scale, before.version) != known:
            return self
        only = before.datasets[0] if len(before.datasets) == 1 else ""
        apart = [p.model_copy(update={"dataset": p.dataset or only}) for p in before.parts]
        kept = [part for part in apart if part.dataset and part.dataset not in self.datasets]
        if not kept:
            return self
        parts = (*kept, *self.parts)
        return self.model_copy(
            update={
                "parts": parts,
                "datasets": (*dict.fromkeys(part.dataset for part in kept), *self.datasets),
                "seeds": min(before.seeds, self.seeds),
            }
        )

    def __str__(self) -> str:
        """Markdown: all parts and the note."""
        return "\n\n".join(filter(None, (*map(str, self.parts), self.note)))

    def write(self, folder: Path) -> None:
        """Leave `finding.json` and `table.md` there."""
        write_beside(folder / FILE, (self.model_dump_json(indent=1) + "\n").encode())
        write_beside(folder / "table.md", f"{self}\n".encode())


def read_finding(path: Path) -> Finding | None:
    """What an experiment left in this file; None if it left none.

    Raises:
        RunError: the file holds something else.
    """
    if not path.exists():
        return None
    try:
        return Finding.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RunError(
            f"{path} is no finding ({error.errors()[0]['msg']}); remove it and run the "
            "experiment again: what it measured is kept"
        ) from None


def listed(claims: Iterable[Claim]) -> str:
    """Claims as a Markdown list."""
    return "\n".join(map(str, claims))


def markdown(table: pd.DataFrame) -> str:
    """A data frame of texts as a Markdown table."""
    rows = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).values.tolist()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


@dataclass(frozen=True)
class Line:
    """An experiment in the list of all."""

    name: str
    what: str
    datasets: tuple[str, ...]
    finding: Finding | None
    absent: tuple[str, ...] = ()
    """Those of its data sets that are not here."""

    @property
    def verdict(self) -> str:
        """What is known of its claims."""
        if self.finding is not None:
            left = [name for name in self.datasets if name not in self.finding.datasets]
            return self.finding.verdict + (f"; without {', '.join(left)}" if left else "")
        if self.absent and set(self.absent) >= set(self.datasets):
            return f"beyond this machine: no {', '.join(self.absent)} here"
        return "not measured"


def overview(lines: Sequence[Line]) -> str:
    """Every experiment with its verdict, as a Markdown table."""
    rows = []
    for line in lines:
        found = line.finding
        rows.append(
            {
                "experiment": f"`{line.name}`",
                "what": line.what,
                "verdict": line.verdict,
                "causes": "; ".join(found.causes) if found else "",
                "data": ", ".join(found.datasets if found else line.datasets),
                "seeds": str(found.seeds) if found else "",
                "scale": found.scale if found else "",
            }
        )
    return markdown(pd.DataFrame(rows))
