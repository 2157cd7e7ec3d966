"""Conformal thresholds next to the model of a run: `conformal.json`."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from fedbayes.likelihoods.conformal import Conformal
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.sidecar import of_client, read_stored, write_stored

FORMAT = "fedbayes-conformal-1"


@dataclass(frozen=True)
class StoredConformal:
    """Thresholds of a run's model, or of its clients' own ones."""

    personal: bool
    """Whether they are of clients' own models."""
    model: str
    """What was calibrated, as `calibrated_model` says it."""
    all: Conformal | None
    """Of all clients' rows together; None of clients' own models."""
    clients: dict[str, Conformal] = field(default_factory=dict)
    """Of each client's rows alone, by its name, where it was asked for."""
    format: str = FORMAT


def conformal_file(folder: RunFolder) -> Path:
    """Where the thresholds of a run are."""
    return folder.path / "conformal.json"


def write_conformal(folder: RunFolder, stored: StoredConformal) -> Path:
    """Write the thresholds of a run, instead of those that are there."""
    return write_stored(conformal_file(folder), stored)


def read_conformal(
    folder: RunFolder, client: str | None = None, *, personal: bool = False
) -> Conformal | None:
    """The thresholds of a model of a run; None where it has none.

    Args:
        folder: of the run.
        client: name of the client whose own rows the threshold is to be of.
        personal: whether it is for the client's own model, and not for the global one.

    Raises:
        RunError: the file is damaged, or has none of this client.
    """
    path, command = (
        conformal_file(folder),
        f"fedbayes calibrate {shlex.quote(str(folder.path))} --method conformal",
    )
    stored = read_stored(StoredConformal, path, FORMAT, folder, command, personal=personal)
    if stored is None:
        return None
    if client is None:
        return stored.all
    return of_client(stored.clients, client, path, "threshold")
