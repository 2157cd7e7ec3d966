"""A client's summary of its table, for a federation that encodes columns by all clients' sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbayes.config.config import Config
from fedbayes.core.files import writable
from fedbayes.data import load_dataset, partition
from fedbayes.data.tables.summaries import TableSummary, summarize
from fedbayes.errors import ConfigError, DataError, warn


@dataclass(frozen=True)
class SummaryJob:
    """Sums and counts of a client's training rows into a file; `fedbayes data summarize`."""

    config: Config
    """Whose `[data]` says how the table is read, and which rows the client tests on."""
    out: Path
    least_rows: int = 10
    """Rows that there must be: sums of few nearly say the rows."""
    least_of_category: int = 1
    """Rows of which a category must be, to be named."""

    def run(self) -> dict[str, Any]:
        """Sum up and write.

        Returns:
            What the file holds.

        Raises:
            FedbayesError: the table cannot be read, or has too few rows.
        """
        source = self.config.data
        writable(self.out, "the summary", (".json",), [source.path])
        if source.name != "own":
            raise ConfigError("give your own table: fedbayes data summarize FILE -o OUT.json")
        settings = source.model_copy(
            update={"clients": 1, "partition": "iid", "limit": None, "group": None}
        )
        dataset = load_dataset(settings, self.config.target_kinds)
        rows = partition(dataset, settings, self.config.seed).train_rows(0)
        if len(rows) < self.least_rows:
            raise DataError(
                f"{source.path or 'the query'} has {len(rows):,} training rows, and sums of few "
                f"rows nearly reveal them; the minimum is {self.least_rows}. Allow fewer with "
                "--min-rows"
            )
        summary = summarize(dataset, rows, self.least_of_category)
        _note_single(summary)
        summary.write(self.out)
        return summary.model_dump()


def _note_single(summary: TableSummary) -> None:
    """Say which categories are of one row each."""
    found: Sequence[str] = [
        f"{column.name} ({sum(count == 1 for count in column.categories.values())})"
        for column in summary.columns
        if 1 in column.categories.values()
    ]
    if found:
        warn(
            f"the summary lists categories that only one row has: {', '.join(found)}. Combine "
            "them with others first, or leave them out with --min-count"
        )
