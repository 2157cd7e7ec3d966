"""The temperature of the model of a run: the summary's, or that of `temperature.json`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedbayes.storage.folder import RunFolder
from fedbayes.storage.sidecar import read_stored, write_stored

FORMAT = "fedbayes-temperature-1"


@dataclass(frozen=True)
class StoredTemperature:
    """The temperature of a run's model, or the one of all its clients' own models."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    personal: bool
    """Whether it is of clients' own models."""
    model: str
    """What was calibrated, as `calibrated_model` says it."""
    rows: int
    """That were counted."""
    format: str = FORMAT


def temperature_file(folder: RunFolder) -> Path:
    """Where the temperature of a run is."""
    return folder.path / "temperature.json"


def write_temperature(folder: RunFolder, stored: StoredTemperature) -> Path:
    """Write the temperature of a run, instead of the one that is there."""
    return write_stored(temperature_file(folder), stored)


def read_temperature(folder: RunFolder, *, personal: bool = False) -> float | None:
    """The temperature of the global model of a run, or of clients' own; None where there is none.

    That of `fedbayes calibrate` comes first, then the one that the run fitted at its end.

    Raises:
        RunError: the file is damaged.
    """
    path = temperature_file(folder)
    command = f"fedbayes calibrate {shlex.quote(str(folder.path))} --temperature"
    stored = read_stored(StoredTemperature, path, FORMAT, folder, command, personal=personal)
    if stored is not None:
        return stored.temperature
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
