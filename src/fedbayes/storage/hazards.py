"""Baseline hazards next to the model of a run: `hazards.json`."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from fedbayes.likelihoods.hazards import Hazards
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.sidecar import of_client, read_stored, write_stored

FORMAT = "fedbayes-hazards-1"


@dataclass(frozen=True)
class StoredHazards:
    """Baseline hazards of a run's model, or of its clients' own ones."""

    personal: bool
    """Whether they are of clients' own models."""
    model: str
    """Digest of the model that log-risks are of."""
    all: Hazards | None
    """Of all clients' rows together; None of clients' own models."""
    clients: dict[str, Hazards] = field(default_factory=dict)
    """Of each client's rows alone, by its name, where it was asked for."""
    format: str = FORMAT


def hazards_file(folder: RunFolder) -> Path:
    """Where the hazards of a run are."""
    return folder.path / "hazards.json"


def write_hazards(folder: RunFolder, stored: StoredHazards) -> Path:
    """Write the hazards of a run, instead of those that are there."""
    return write_stored(hazards_file(folder), stored)


def read_hazards(
    folder: RunFolder, client: str | None = None, *, personal: bool = False
) -> Hazards | None:
    """The hazards of a model of a run; None where it has none.

    Args:
        folder: of the run.
        client: name of the client whose own rows they are to be of.
        personal: whether they are for the client's own model, and not for the global one.

    Raises:
        RunError: the file is damaged, or has none of this client.
    """
    path, command = (
        hazards_file(folder),
        f"fedbayes calibrate {shlex.quote(str(folder.path))} --method hazards",
    )
    stored = read_stored(StoredHazards, path, FORMAT, folder, command, personal=personal)
    if stored is None:
        return None
    if client is None:
        return stored.all
    return of_client(stored.clients, client, path, "hazards")
