"""Contributions of clients to the model of a run: `contributions.json`."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from fedbayes.core.files import read_bytes, write_beside
from fedbayes.core.seals import sealed_table, unsealed_table
from fedbayes.errors import RunError, told_as, warn
from fedbayes.storage.calibrations import calibrated_model
from fedbayes.storage.folder import RunFolder

FORMAT = "fedbayes-contributions-1"


@dataclass(frozen=True)
class Contribution:
    """What a client adds to the mean log-likelihood of validation rows, in nats a row."""

    rows: int
    """Its training rows."""
    left_out: float
    """By leave-one-out: all clients' value minus that of the others."""
    left_out_error: float
    """Its standard error over rows."""
    shapley: float
    """Mean over all orders of clients of what it adds to those before it."""
    shapley_error: float
    """Its standard error over rows, and over orders where these are drawn."""


@dataclass(frozen=True)
class Contributions:
    """What the clients of a run add to its global model."""

    model: str
    """The model, as `calibrated_model` says it."""
    rows: int
    """Validation rows of all clients."""
    everyone: float
    """Mean log-likelihood of a validation row under the model of all clients, in nats."""
    nobody: float
    """The same under the state before the first round."""
    orders: int
    """Orders of clients that were drawn; 0: all of them count."""
    clients: dict[str, Contribution] = field(default_factory=dict)
    """By name."""
    format: str = FORMAT

    def table(self) -> list[list[str]]:
        """A header, and a row for each client, the largest Shapley value first."""
        rows = [["client", "training rows", "leave-one-out", "Shapley value"]]
        order = sorted(self.clients.items(), key=lambda item: -item[1].shapley)
        for name, one in order:
            rows.append(
                [
                    name,
                    f"{one.rows:,}",
                    f"{one.left_out:.4f} ± {one.left_out_error:.4f}",
                    f"{one.shapley:.4f} ± {one.shapley_error:.4f}",
                ]
            )
        return rows

    def __str__(self) -> str:
        """The table, aligned, and the note below."""
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, self.note])

    @property
    def note(self) -> str:
        """What the numbers are of, in words."""
        drawn = f", over {self.orders:,} orders of clients" if self.orders else ""
        gain = self.everyone - self.nobody
        rounding = 1e-9 * (1 + abs(gain))
        above = any(one.left_out > max(gain, 0.0) + rounding for one in self.clients.values())
        advice = (
            "Without some client the model is worse than the untrained one, as it was not trained "
            "further. Only compare the order of clients."
            if above
            else "If the two differ, trust leave-one-out."
        )
        return (
            f"Nats a row of {self.rows:,} validation rows, ± standard error{drawn}. The Shapley "
            f"values sum to {gain:.4f}: from {self.nobody:.4f}, of the untrained model, to "
            f"{self.everyone:.4f} with all clients. Clients are left out without retraining, "
            f"and sets of few clients predict poorly. {advice}"
        )


def contributions_file(folder: RunFolder) -> Path:
    """Where the contributions of a run are."""
    return folder.path / "contributions.json"


def write_contributions(folder: RunFolder, found: Contributions) -> Path:
    """Write the contributions of a run, and replace earlier ones."""
    path = contributions_file(folder)
    write_beside(path, sealed_table(_FORM.dump_python(found, mode="json")))
    return path


def read_contributions(folder: RunFolder) -> Contributions | None:
    """The contributions to the model that a run has; None where they were not measured.

    Raises:
        RunError: the file is damaged.
    """
    path = contributions_file(folder)
    again = shlex.join(["fedbayes", "contributions", str(folder.path)])
    if not path.exists():
        return None
    after = f". Write it again: {again}"
    with told_as(RunError, f"cannot read {path}", OSError, ValueError, after=after):
        found = _FORM.validate_python(unsealed_table(read_bytes(path)))
        if found.format != FORMAT:
            raise ValueError(f"its format is {found.format}")
    if found.model != calibrated_model(folder, personal=False):
        warn(
            f"{path} belongs to another model than the run has now, so it is not used. Write it "
            f"again: {again}"
        )
        return None
    return found


_FORM = TypeAdapter(Contributions)
