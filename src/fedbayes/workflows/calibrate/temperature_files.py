"""The temperature of a model file, from sums that clients send in files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from fedbayes.core.brief import Brief
from fedbayes.core.files import digest, read_bytes, writable, write_beside
from fedbayes.core.plausible import MOST_ROWS
from fedbayes.data.tables.summaries import read_as
from fedbayes.errors import DataError, ModelError, RunError
from fedbayes.likelihoods.temperature import TemperatureSums, has_temperature, sums_of
from fedbayes.models.files import with_card
from fedbayes.storage.card import Card
from fedbayes.workflows.fuse.adapter_files import CONFIG
from fedbayes.workflows.fuse.client_sums import LEAST
from fedbayes.workflows.fuse.posterior_files import is_posterior
from fedbayes.workflows.serve.evaluation_set import (
    card_of,
    find_training,
    is_program,
    named_by,
)
from fedbayes.workflows.serve.model_evaluation import check_fits, doubt_order, open_model
from fedbayes.workflows.serve.model_files import WEIGHTS, ModelFiles, read_with_card, write_model

FORMAT = "fedbayes-temperature-sums-1"


class _TemperatureFile(BaseModel):
    """The JSON file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: str
    model: str
    """Digest of the model's file."""
    rows: Annotated[int, Field(ge=0, le=MOST_ROWS)]
    left_out: Annotated[int, Field(ge=0, le=MOST_ROWS)]
    nll: list[FiniteFloat]
    slope: list[FiniteFloat]
    curvature: list[FiniteFloat]


@dataclass(frozen=True, repr=False)
class CalibratedModel(Brief):
    """What `calibrate_model` found and wrote."""

    path: Path
    temperature: float
    clients: int
    """Whose sums it is from."""
    rows: int
    """Behind these sums."""
    left_out: int
    """Rows without a prediction, or whose true class had probability 0."""
    replaced: float | None
    """The temperature that the model had; None if it had none."""


def write_temperature_sums(
    model: Path, data: Path, out: Path, given: Sequence[str] = (), *, least: int = LEAST
) -> TemperatureSums:
    """Write a client's sums of the predictions of a model file as JSON, whole or not at all.

    Args:
        model: the file, with a card.
        data: rows of the client that the model was not trained on.
        out: `.json` file to write.
        given: settings of `[data]`, of how rows are read.
        least: number of rows that sums may be of.

    Returns:
        The sums.

    Raises:
        FedbayesError: a file cannot be read or written, the model has no temperature or does not
            fit the rows, or there are too few rows.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> import numpy as np
        >>> from sklearn.datasets import load_digits
        >>> from fedbayes.workflows.calibrate.temperature_files import write_temperature_sums
        >>> from fedbayes.workflows.serve.export import export
        >>> run = fedbayes.run(rounds=1, model={"hidden": [8]}, data={"limit": 200}, out="summed")
        >>> model, rows, sums = Path("summed.safetensors"), Path("rows.npz"), Path("summed.json")
        >>> export(run.folder, model).path.name
        'summed.safetensors'
        >>> np.savez(rows, x=load_digits().images[:100], y=load_digits().target[:100])
        >>> write_temperature_sums(model, rows, sums, ["data.scale=16"]).rows
        100
    """
    writable(out, "the sums", (".json",), [data, model])
    _card(model, named_by(given))
    rows = find_training(model, data, given, ((), ()))
    found = open_model(model, rows)
    if not has_temperature(found.likelihood) or found.means:
        raise ModelError(
            f"{model} predicts no probabilities of classes or labels, so it has no temperature"
        )
    check_fits(str(model), found, rows)
    doubt_order(str(model), found, rows)
    sums = sums_of(found.likelihood, found.draw, rows.samples)
    if sums.rows < least:
        raise DataError(
            f"{data} has {sums.rows:,} rows with a prediction, and sums of few rows nearly reveal "
            f"them; the minimum is {least}. Combine them with other rows, or set --min-rows"
        )
    content = _TemperatureFile(
        format=FORMAT,
        model=digest(read_bytes(model)),
        rows=sums.rows,
        left_out=sums.left_out,
        nll=sums.nll.tolist(),
        slope=sums.slope.tolist(),
        curvature=sums.curvature.tolist(),
    )
    write_beside(out, json.dumps(content.model_dump()).encode() + b"\n")
    return sums


def calibrate_model(model: Path, sums: Sequence[Path], out: Path) -> CalibratedModel:
    """Write a model file with the temperature that clients' sums give.

    It has the least negative log-likelihood on the rows of all these clients, under the prior of
    `TemperatureSums.with_prior`. `fedbayes predict` and `evaluate` apply it.

    Args:
        model: the file that the sums are of; it stays as it is.
        sums: a file of each client.
        out: file to write, of the same kind as the model.

    Raises:
        FedbayesError: a file cannot be read or written, or is of another model; or no temperature
            is the best.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> import numpy as np
        >>> from sklearn.datasets import load_digits
        >>> from fedbayes.workflows.calibrate import temperature_files
        >>> from fedbayes.workflows.serve.export import export
        >>> few = {"clients": 2, "limit": 200}
        >>> run = fedbayes.run(rounds=1, model={"hidden": [8]}, data=few, out="uncalibrated")
        >>> model, kept, sums = Path("plain.safetensors"), Path("kept.npz"), Path("sums.json")
        >>> export(run.folder, model).path.name
        'plain.safetensors'
        >>> np.savez(kept, x=load_digits().images[:100], y=load_digits().target[:100])
        >>> temperature_files.write_temperature_sums(model, kept, sums, ["data.scale=16"]).rows
        100
        >>> temperature_files.calibrate_model(model, [sums], Path("calibrated.safetensors")).rows
        100
    """
    program = is_program(model)
    writable(out, "the model", (".pt2",) if program else WEIGHTS, [model, *sums])
    card = _card(model, frozenset())
    here, total = digest(read_bytes(model)), TemperatureSums.nothing()
    before: dict[str, Path] = {}
    for path in sums:
        found, of_model = _read(path)
        if (first := before.setdefault(digest(read_bytes(path)), path)) is not path:
            raise DataError(f"{path} is the same as {first}. Give each client's file once")
        if of_model != here:
            raise DataError(
                f"{path} has sums of another file than {model}. Create them with: fedbayes sums "
                f"{model} --data FILE --temperature -o sums.json"
            )
        total += found
    temperature = total.with_prior().temperature()
    changed = replace(card, temperature=temperature)
    if program:
        write_beside(out, with_card(model, changed.dump()))
    else:
        write_model(out, read_with_card(model)[0], changed)
    return CalibratedModel(
        out, temperature, len(sums), total.rows, total.left_out, card.temperature
    )


def _read(path: Path) -> tuple[TemperatureSums, str]:
    """Sums that a client sent, and the digest of their model's file."""
    file = read_as(_TemperatureFile, path, "does not contain sums for a temperature")
    if file.format != FORMAT:
        raise DataError(
            f"{path} does not contain sums for a temperature: its format is {file.format!r}, not "
            f"{FORMAT!r}"
        )
    nll, slope, curvature = (
        torch.tensor(values, dtype=torch.float64)
        for values in (file.nll, file.slope, file.curvature)
    )
    sums = TemperatureSums(nll, slope, curvature, file.rows, file.left_out)
    sums.check(str(path))
    return sums, file.model


def _card(model: Path, trusted: frozenset[str]) -> Card:
    """The card of a model file, where its temperature is kept."""
    refuse_folder(model)
    if not is_program(model) and is_posterior(model):
        raise ModelError(
            f"{model} is a client's posterior, whose temperature is fitted by fedbayes posterior "
            "--temperature. Give a model file"
        )
    card = card_of(model, ModelFiles(trusted))
    if card is None:
        raise ModelError(
            f"{model} has no card to keep a temperature in. Write the model with fedbayes fuse or "
            "fedbayes export"
        )
    return card


def refuse_folder(model: Path) -> None:
    """See that a path is not of a folder.

    Raises:
        ModelError: it is a PEFT folder.
        RunError: it is another.
    """
    if (model / CONFIG).is_file():
        raise ModelError(
            f"{model} is a PEFT folder, which has no place for a temperature. Fuse clients' files "
            "to a file, such as -o fused.safetensors"
        )
    if model.is_dir():
        raise RunError(
            f"{model} is a folder, not a model file. Calibrate a run with fedbayes calibrate "
            f"{model} --method temperature"
        )
