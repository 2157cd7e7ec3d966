"""Baseline hazards beside the model of a run: `hazards.json`."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedbayes.data.wording import listed
from fedbayes.errors import FedbayesWarning, RunError
from fedbayes.files import parse_json, read_bytes, write_beside
from fedbayes.likelihoods.hazards import Hazards
from fedbayes.runs.conformal import calibrated_model
from fedbayes.runs.folder import RunFolder

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
    """Write the hazards of a run, in place of those that are there."""
    path = hazards_file(folder)
    write_beside(path, TypeAdapter(StoredHazards).dump_json(stored, indent=2) + b"\n")
    return path


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
    path = hazards_file(folder)
    if not path.exists():
        return None
    try:
        stored = TypeAdapter(StoredHazards).validate_python(parse_json(read_bytes(path)))
    except (OSError, ValueError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise RunError(
            f"cannot read {path}: {reason}; make it anew: fedbayes hazards {folder.path}"
        ) from None
    if stored.format != FORMAT:
        raise RunError(f"{path} is of another version ({stored.format}); make it anew")
    if stored.personal != personal:
        return None
    if stored.model != calibrated_model(folder, personal=personal):
        warnings.warn(
            f"{path} is of another model than the run has now, so it is not used; make it anew: "
            f"fedbayes hazards {folder.path}",
            FedbayesWarning,
            stacklevel=3,
        )
        return None
    if client is None:
        return stored.all
    if client not in stored.clients:
        there = f"; there are {listed(tuple(stored.clients))}" if stored.clients else ""
        raise RunError(f"{path} has no hazards of client {client}{there}")
    return stored.clients[client]
