"""What was found of a run's model afterwards, in a JSON file next to it that knows the model."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from fedbayes.core.files import digest, read_bytes, write_beside
from fedbayes.core.seals import sealed_table, unsealed_table
from fedbayes.core.wording import listed
from fedbayes.errors import FedbayesWarning, RunError
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.progress import DIGEST


class Stored(Protocol):
    """Content of such a file."""

    @property
    def personal(self) -> bool:
        """Whether it is of clients' own models."""

    @property
    def model(self) -> str:
        """What it is of, as `calibrated_model` says it."""

    @property
    def format(self) -> str:
        """The version of the file."""


Kind = TypeVar("Kind", bound=Stored)
Found = TypeVar("Found")


def calibrated_model(folder: RunFolder, *, personal: bool) -> str:
    """Digest of the file of the global model, or of the checkpoint behind clients' own."""
    if not personal:
        return digest(folder.model_bytes())
    progress = folder.progress(folder.best_round())
    if progress is None:
        raise RunError(f"{folder.path} has no checkpoint")
    states = progress.states
    if not len(states):
        return digest(f"{progress.round} ".encode())
    digests = torch.zeros(len(folder.client_names()), DIGEST, dtype=torch.uint8)
    digests[states.clients] = states.columns["digest"]
    return digest(f"{progress.round} ".encode() + digests.numpy().tobytes())


def write_stored(path: Path, stored: Stored) -> Path:
    """Write the file, instead of the one that is there; says so if that is of other models."""
    with suppress(OSError, ValueError):
        before = unsealed_table(read_bytes(path))
        if before.get("personal") is not None and before["personal"] != stored.personal:
            whose = ("the global model", "clients' own models")
            one, other = whose[before["personal"]], whose[stored.personal]
            warnings.warn(
                f"{path} was of {one}, and is now of {other}: predictions of {one} are without it",
                FedbayesWarning,
                stacklevel=4,
            )
    write_beside(path, sealed_table(TypeAdapter(type(stored)).dump_python(stored, mode="json")))
    return path


def read_stored(
    kind: type[Kind], path: Path, version: str, folder: RunFolder, command: str, *, personal: bool
) -> Kind | None:
    """What the file says of the model that the run has now; None where it says nothing of it.

    Args:
        kind: of its content.
        path: the file.
        version: its format.
        folder: of the run.
        command: that makes it again.
        personal: whether what it says is to be of clients' own models, and not of the global one.

    Raises:
        RunError: the file is damaged, or of another version.
    """
    if not path.exists():
        return None
    try:
        stored = TypeAdapter(kind).validate_python(unsealed_table(read_bytes(path)))
    except (OSError, ValueError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise RunError(f"cannot read {path}: {reason}; make it again: {command}") from None
    if stored.format != version:
        raise RunError(f"{path} is of another version ({stored.format}); make it again: {command}")
    if stored.personal != personal:
        return None
    if stored.model != calibrated_model(folder, personal=personal):
        warnings.warn(
            f"{path} is of another model than the run has now, so it is not used; make it again: "
            f"{command}",
            FedbayesWarning,
            stacklevel=4,
        )
        return None
    return stored


def of_client(clients: Mapping[str, Found], client: str, path: Path, what: str) -> Found:
    """What such a file has of one client.

    Raises:
        RunError: nothing.
    """
    if client not in clients:
        there = f"; there are {listed(tuple(clients))}" if clients else ""
        raise RunError(f"{path} has no {what} of client {client}{there}")
    return clients[client]
