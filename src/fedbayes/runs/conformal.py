"""Conformal thresholds beside the model of a run: `conformal.json`."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedbayes.data.wording import listed
from fedbayes.errors import FedbayesWarning, RunError
from fedbayes.files import digest, parse_json, read_bytes, write_beside
from fedbayes.likelihoods.conformal import Conformal
from fedbayes.runs.folder import RunFolder

FORMAT = "fedbayes-conformal-1"


@dataclass(frozen=True)
class StoredConformal:
    """Thresholds of a run's model, or of its clients' own ones."""

    personal: bool
    """Whether they are of clients' own models."""
    model: str
    """What was calibrated: digest of the file of the global model, or of the checkpoint behind
    clients' own."""
    all: Conformal | None
    """Of all clients' rows together; None of clients' own models."""
    clients: dict[str, Conformal] = field(default_factory=dict)
    """Of each client's rows alone, by its name, where it was asked for."""
    format: str = FORMAT


def conformal_file(folder: RunFolder) -> Path:
    """Where the thresholds of a run are."""
    return folder.path / "conformal.json"


def calibrated_model(folder: RunFolder, *, personal: bool) -> str:
    """The digest of what thresholds are of."""
    if not personal:
        return digest(read_bytes(folder.model_file))
    progress = folder.progress(folder.best_round())
    if progress is None:
        raise RunError(f"{folder.path} has no checkpoint")
    return digest(f"{progress.round} ".encode() + progress.digests.numpy().tobytes())


def write_conformal(folder: RunFolder, stored: StoredConformal) -> Path:
    """Write the thresholds of a run, in place of those that are there."""
    path = conformal_file(folder)
    write_beside(path, TypeAdapter(StoredConformal).dump_json(stored, indent=2) + b"\n")
    return path


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
    path = conformal_file(folder)
    if not path.exists():
        return None
    try:
        stored = TypeAdapter(StoredConformal).validate_python(parse_json(read_bytes(path)))
    except (OSError, ValueError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise RunError(
            f"cannot read {path}: {reason}; make it anew: fedbayes conformal {folder.path}"
        ) from None
    if stored.format != FORMAT:
        raise RunError(f"{path} is of another version ({stored.format}); make it anew")
    if stored.personal != personal:
        return None
    if stored.model != calibrated_model(folder, personal=personal):
        warnings.warn(
            f"{path} is of another model than the run has now, so it is not used; make it anew: "
            f"fedbayes conformal {folder.path}",
            FedbayesWarning,
            stacklevel=3,
        )
        return None
    if client is None:
        return stored.all
    if client not in stored.clients:
        there = f"; there are {listed(tuple(stored.clients))}" if stored.clients else ""
        raise RunError(f"{path} has no threshold of client {client}{there}")
    return stored.clients[client]
