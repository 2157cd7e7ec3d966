"""Calibration of a run's model after its end, in `calibration.json` next to the model.

A temperature, thresholds of conformal sets and baseline hazards are kept in one form, each with the
digest of the models that it is of. Files of older runs have one of them each, and are read too.
"""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
from pydantic import Field, TypeAdapter

from fedbayes.core.files import digest, read_bytes, write_beside
from fedbayes.core.seals import sealed_table, unsealed_table
from fedbayes.core.wording import listed
from fedbayes.errors import RunError, told_as, warn
from fedbayes.likelihoods.conformal import Conformal
from fedbayes.likelihoods.hazards import Hazards
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.progress import DIGEST

FORMAT = "fedbayes-calibration-1"
FILE = "calibration.json"

Found = TypeVar("Found")


@dataclass(frozen=True)
class Temperature:
    """A temperature of probabilities."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rows: int
    """That were counted."""


@dataclass(frozen=True)
class StoredCalibration(Generic[Found]):
    """What was found of a run's model, or of its clients' own ones."""

    personal: bool
    """Whether it is of clients' own models."""
    model: str
    """What was calibrated, as `calibrated_model` says it."""
    all: Found | None
    """Of all clients' rows together; None where every model has its own."""
    clients: dict[str, Found] = field(default_factory=dict)
    """Of each client's rows alone, by its name, where it was asked for."""


@dataclass(frozen=True)
class CalibrationKind(Generic[Found]):
    """A kind of calibration."""

    name: str
    """In the file; an older run has a file of that name instead."""
    of: type[Found]
    what: str
    """What it is of one client, for errors."""

    def again(self, folder: RunFolder) -> str:
        """The command that computes it again for a run."""
        return shlex.join(["fedbayes", "calibrate", str(folder.path), "--method", self.name])


TEMPERATURE = CalibrationKind("temperature", Temperature, "temperature")
CONFORMAL = CalibrationKind("conformal", Conformal, "threshold")
HAZARDS = CalibrationKind("hazards", Hazards, "hazards")


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


def write_calibration(
    kind: CalibrationKind[Found], folder: RunFolder, found: StoredCalibration[Found]
) -> Path:
    """Write a calibration, and replace an earlier one; a warning says if that is of other models.

    Other calibrations in the file stay; if the file is damaged, a warning says that they are lost.
    """
    path, older = folder.path / FILE, _older_file(kind, folder)
    tables: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        tables |= _tables(older)
    try:
        tables |= _tables(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        warn(f"cannot read {path}: {error}. A new file replaces it, with only the {kind.name}")
    before = tables.get(kind.name, {}).get("personal")
    if before not in (None, found.personal):
        whose = ("the global model", "clients' own models")
        one, other = whose[before], whose[found.personal]
        warn(
            f"{path} ({kind.name}) was for {one}, and is now for {other}. Predictions of {one} no "
            "longer use it"
        )
    elif tables.get(kind.name, {}).get("clients") and not found.clients:
        warn(f"{path} has no {kind.what} of single clients any more. Keep them with --per-client")
    tables[kind.name] = _form(kind).dump_python(found, mode="json")
    write_beside(path, sealed_table({"format": FORMAT, **tables}))
    older.unlink(missing_ok=True)
    return path


def read_calibration(
    kind: CalibrationKind[Found],
    folder: RunFolder,
    client: str | None = None,
    *,
    personal: bool = False,
) -> Found | None:
    """What was found of the model that a run has now; None where nothing was.

    Args:
        kind: of calibration.
        folder: of the run.
        client: name of the client whose own rows it is to be of.
        personal: whether it is for the client's own model, and not for the global one.

    Raises:
        RunError: the file is damaged or of another version, or has nothing of this client.
    """
    path, again = folder.path / FILE, kind.again(folder)
    stored = None
    for source in (path, _older_file(kind, folder)):
        after = f". Create it again: {again}"
        with told_as(RunError, f"cannot read {source}", OSError, ValueError, after=after):
            table = _tables(source).get(kind.name) if source.exists() else None
            stored = None if table is None else _form(kind).validate_python(table)
        if stored is not None:
            break
    if stored is None or stored.personal != personal:
        return None
    if stored.model != calibrated_model(folder, personal=personal):
        warn(
            f"{source} ({kind.name}) belongs to another model than the run has now, so it is not "
            f"used. Create it again: {again}"
        )
        return None
    if client is None or kind is TEMPERATURE:
        return stored.all
    if client not in stored.clients:
        there = f"; there are {listed(tuple(stored.clients))}" if stored.clients else ""
        raise RunError(
            f"{source} has no {kind.what} of client {client}{there}. Create it: {again} "
            "--per-client"
        )
    return stored.clients[client]


def read_temperature(folder: RunFolder, *, personal: bool = False) -> float | None:
    """The temperature of the global model of a run, or of clients' own; None where there is none.

    That of `fedbayes calibrate` comes first, then the one that the run fitted at its end.

    Raises:
        RunError: the file is damaged.
    """
    found = read_calibration(TEMPERATURE, folder, personal=personal)
    if found is not None:
        return found.temperature
    return None if personal else own_temperature(folder)


def own_temperature(folder: RunFolder) -> float | None:
    """The temperature that a run fitted at its end for the model that it saved; None: it did not.

    Raises:
        RunError: the summary is damaged.
    """
    if not folder.summary_file.exists():
        return None
    summary = folder.summary()
    found = summary.get("best_temperature", summary.get("temperature"))
    return None if found is None else float(found)


def _form(kind: CalibrationKind[Found]) -> TypeAdapter[StoredCalibration[Found]]:
    return TypeAdapter(StoredCalibration[kind.of])  # type: ignore[name-defined]


def _older_file(kind: CalibrationKind[Any], folder: RunFolder) -> Path:
    return folder.path / f"{kind.name}.json"


def _tables(path: Path) -> Mapping[str, Any]:
    """What a file has of each kind."""
    content = unsealed_table(read_bytes(path))
    version, name = content.pop("format", None), path.stem
    if version == FORMAT:
        return content
    if path.name == FILE or version != f"fedbayes-{name}-1":
        raise ValueError(f"it has another version ({version})")
    if name == TEMPERATURE.name:
        number = {key: content.pop(key, None) for key in ("temperature", "rows")}
        content["all"] = number
    return {name: content}
