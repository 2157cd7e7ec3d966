"""The global model of a run, for use elsewhere: as weights, as a program, cut to its size."""

import io
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fedbayes.errors import RunError
from fedbayes.experiment.build import build_party, stored_data
from fedbayes.experiment.record import RunFolder, write_beside
from fedbayes.experiment.silos import writable, write_model
from fedbayes.models.compact import compact, difference, with_weights
from fedbayes.tensors import parameter_count

PROGRAM = ".pt2"
"""Suffix of a program of `torch.export`, which runs without this package."""
TRIED = 64
"""Test samples that the exported model is tried on."""


@dataclass(frozen=True)
class Export:
    """What was exported."""

    path: Path
    parameters: int
    """Of the global model."""
    kept: int
    """Of the exported one."""
    difference: float
    """Largest difference of log-probabilities between both, on some test samples."""


def export(folder: Path, path: Path, *, small: bool = False) -> Export:
    """Write the global model of a run that has ended.

    Args:
        folder: the run folder.
        path: `.safetensors`, `.pt` or `.pth` for weights by name, `.pt2` for a program that
            `torch.export.load` reads.
        small: cut out the units that are all zero.

    Raises:
        RunError: the run has not ended, its model is not one network (an ensemble, say) but must
            be, or the path cannot be written.
    """
    writable(path, "the model")
    run = RunFolder(folder)
    weights = run.model()
    if path.suffix != PROGRAM and not small:
        write_model(path, weights)
        size = parameter_count(weights)
        return Export(path, size, size, 0.0)
    config = run.config()
    data = stored_data(config, run)
    network = build_party(config.model_copy(update={"device": "cpu"}), data).network
    if weights.keys() != network.initial.keys():
        raise RunError(
            f"the model of {folder} ({config.method['name']}) is not one network; without "
            "--compact it can be exported as weights (.safetensors)"
        )
    whole = with_weights(network.module, weights)
    module = compact(network.module, weights) if small else whole
    x = data.test_union(0, min(TRIED, data.test_total)).x
    if not len(x):
        x = torch.zeros(1, *data.dataset.shape)
    tensors = module.state_dict()
    if path.suffix == PROGRAM:
        write_beside(path, _program(module, x))
    else:
        write_model(path, tensors)
    kept = sum(parameter.numel() for parameter in module.parameters())
    return Export(path, parameter_count(weights), kept, difference(whole, module, x))


def _program(module: nn.Module, x: torch.Tensor) -> bytes:
    """The module as a program for batches of any size."""
    batch = torch.export.Dim("batch")
    example = x[:1].expand(2, *x.shape[1:]).contiguous()
    program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()
