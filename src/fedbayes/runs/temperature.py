"""The temperature beside the model of a run: `temperature.json`."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from fedbayes.errors import FedbayesWarning, RunError
from fedbayes.files import parse_json, read_bytes, write_beside
from fedbayes.runs.conformal import calibrated_model
from fedbayes.runs.folder import RunFolder

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
    """Write the temperature of a run, in place of the one that is there."""
    path = temperature_file(folder)
    write_beside(path, TypeAdapter(StoredTemperature).dump_json(stored, indent=2) + b"\n")
    return path


def read_temperature(folder: RunFolder, *, personal: bool = False) -> float | None:
    """The temperature of the global model of a run, or of clients' own; None where there is none.

    Raises:
        RunError: the file is damaged.
    """
    path = temperature_file(folder)
    if not path.exists():
        return None
    try:
        stored = TypeAdapter(StoredTemperature).validate_python(parse_json(read_bytes(path)))
    except (OSError, ValueError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise RunError(f"cannot read {path}: {reason}; {_anew(folder)}") from None
    if stored.format != FORMAT:
        raise RunError(f"{path} is of another version ({stored.format}); {_anew(folder)}")
    if stored.personal != personal:
        return None
    if stored.model != calibrated_model(folder, personal=personal):
        warnings.warn(
            f"{path} is of another model than the run has now, so it is not used; {_anew(folder)}",
            FedbayesWarning,
            stacklevel=3,
        )
        return None
    return stored.temperature


def _anew(folder: RunFolder) -> str:
    return f"make it anew: fedbayes calibrate {folder.path} --temperature"
