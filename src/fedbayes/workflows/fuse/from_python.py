"""`fedbayes.fuse`: fusion of files, networks or weights from Python, as the command does it."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedbayes.core.brief import Brief
from fedbayes.core.lazy import place_of
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError, FedbayesError, ModelError, told_as
from fedbayes.fusion import Fusion
from fedbayes.fusion import fuse as fuse_weights
from fedbayes.models import ModelSettings, read_model
from fedbayes.models.units import evaluating
from fedbayes.workflows.fuse.adapter_files import TENSORS
from fedbayes.workflows.serve.evaluation_set import is_program
from fedbayes.workflows.serve.model_files import ModelFiles

COUNTS = "counts.json"
Model = Path | str | nn.Module | Mapping[str, torch.Tensor]
"""A model file, a network, or its `state_dict`."""


@dataclass(frozen=True, repr=False)
class FusedModel(Brief):
    """A model that was fused from files or networks.

    Examples:
        >>> import fedbayes
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 6), ReLU(), Linear(6, 3)) for _ in range(2)]
        >>> fused = fedbayes.fuse(nets, method="average", shape=(4,))
        >>> nets[0].load_state_dict(fused.weights)
        <All keys matched successfully>
    """

    path: Path
    """The file of the fused model."""
    weights: Tensors
    """Its `state_dict`; empty for a `.pt2` program."""
    summary: dict[str, Any]
    """What `fedbayes fuse --json` prints."""
    notes: tuple[str, ...] = ()
    keep: object = field(default=None, compare=False)
    """A temporary folder, which lives as long as this object."""


def fuse(
    models: Sequence[Model] | Mapping[str, Model],
    *,
    method: str = "auto",
    out: Path | str | None = None,
    counts: npt.ArrayLike | Path | str | None = None,
    seed: int = 0,
    watch: Callable[[str], None] | None = None,
    **options: Any,
) -> FusedModel | Fusion:
    """Fuse models that were trained separately into one, as `fedbayes fuse` does.

    Args:
        models: model files, folders of LoRA adapters (PEFT), networks (`torch.nn.Module`; of
            different architectures with `shape`), or `state_dict`s of fully connected networks; a
            list, or a dict by name.
        method: a method of `fedbayes fuse`. `auto`: fusion in function space if the inputs of the
            models are known (from their files, or from `shape`), else `gpi-fnm`.
        out: the file of the fused model, or of adapters the folder; a temporary one by default.
            For files and networks.
        counts: number of training samples of each model and class [S, K], or its JSON file.
        seed: of synthetic inputs, or of the order of the models.
        watch: called with the name of each step.
        **options: options of the command (`shape=(1, 28, 28)`, `inputs="strokes"`, `width=0.5`)
            and settings of the method (`gamma=5.0`).

    Returns:
        For files and networks a `FusedModel` with the file and its weights; for `state_dict`s a
        `Fusion` with the assignment of neurons.

    Raises:
        ModelError: the models cannot be read, or do not fit each other.
        ConfigError: there is no such method, or an option has no effect on it.

    Examples:
        >>> import fedbayes
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 6), ReLU(), Linear(6, 3)) for _ in range(2)]
        >>> fedbayes.fuse([net.state_dict() for net in nets], method="average").sizes
        [6]
        >>> sorted(fedbayes.fuse(nets, method="average", shape=(4,)).weights)
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    named = models if isinstance(models, Mapping) else {str(k): m for k, m in enumerate(models)}
    if (
        isinstance(counts, Mapping)
        and isinstance(models, Mapping)
        and counts.keys() >= named.keys()
    ):
        counts = [counts[name] for name in named]
    kinds = {_kind(name, model) for name, model in named.items()}
    if not kinds:
        raise ModelError("there are no models to fuse")
    if len(kinds) > 1:
        raise ModelError(f"the models are {' and '.join(sorted(kinds))}. Give models of one kind")
    if kinds <= {"state_dicts"}:
        if out is not None:
            raise ConfigError("out has no effect on state_dicts. Leave it out, or give files")
        chosen: Any = "gpi-fnm" if method == "auto" else method
        weights: Any = named
        return fuse_weights(
            weights,
            method=chosen,
            counts=counts,  # type: ignore[arg-type]
            seed=seed,
            watch=watch,
            **options,
        )
    from fedbayes.workflows.fuse.job import FusionJob, checked, ignore
    from fedbayes.workflows.fuse.methods import FUSIONS

    own = {one.name for one in fields(FusionJob)}
    job = {name: value for name, value in options.items() if name in own}
    settings = {name: value for name, value in options.items() if name not in own}
    folder = TemporaryDirectory(prefix="fedbayes-")
    place = Path(folder.name)
    if kinds == {"networks"}:
        networks = {name: model for name, model in named.items() if isinstance(model, nn.Module)}
        paths = _written(networks, place, job.get("shape"))
        first = next(iter(networks.values()))
        if is_program(paths[0]) and method not in ("auto", "function"):
            raise ModelError(
                f"the networks have different weights, and {method} needs the same. Choose "
                "method='function'"
            )
        heard = FUSIONS[method].options if method in FUSIONS else ("model", "classes")
        if not is_program(paths[0]) and "model" in heard:
            job.setdefault("model", ModelSettings(name=place_of(first)))
        if job.get("shape") is not None and "classes" in heard:
            job.setdefault("classes", _outputs(first, job["shape"]))
    else:
        paths = [Path(str(model)) for model in named.values()]
        if isinstance(job.get("model"), str):
            job["model"] = checked(ModelSettings, {"name": job["model"]}, "model.")
    trusted = [job["model"].name] if job.get("model") is not None else []
    paths_of = ("like", "test", "temperature_data", "state", "show_inputs", "select", "report")
    for name in (*paths_of, "picture"):
        if job.get(name) is not None:
            job[name] = Path(job[name])
    if (sums := job.get("sums")) is not None:
        several = [sums] if isinstance(sums, str | Path) else sums
        job["sums"] = tuple(map(Path, several))
    if (inputs := job.get("inputs")) is not None:
        if not isinstance(inputs, str | Path):
            raise ConfigError(
                "inputs is the name of an input prior, a file or module:function. Save arrays with "
                "numpy.savez(FILE, x=inputs), and give the file"
            )
        job["inputs"] = str(inputs)
    for name in ("mean", "std"):
        if isinstance(job.get(name), int | float):
            job[name] = (float(job[name]),)
    written = ".pt2" if is_program(paths[0]) else ".safetensors"
    own_name = "fused" if any(path.is_dir() for path in paths) else f"fused{written}"
    target = place / own_name if out is None else Path(out)
    prepared = FusionJob(
        paths,
        target,
        method=None if method == "auto" else method,
        settings=settings,
        counts=_counts(counts, place),
        seed=seed,
        files=ModelFiles([name for name in trusted if ":" in name]),
        **job,
    )
    try:
        done = prepared.run(watch or ignore)
    except FedbayesError as error:  # in the words of the caller, who wrote no file
        raise type(error)(str(error).replace(str(place / COUNTS), "counts")) from None
    return FusedModel(
        target,
        {} if is_program(target) else read_model(_tensors(target))[0],
        done.summary,
        done.notes,
        folder if out is None else None,
    )


def _tensors(path: Path) -> Path:
    """The file of weights of what was written: of adapters it is in a folder."""
    return path / TENSORS[0] if path.is_dir() else path


def _kind(name: str, model: object) -> str:
    """What a model is given as."""
    if isinstance(model, Path | str):
        return "files"
    if isinstance(model, nn.Module):
        return "networks"
    if isinstance(model, Mapping):
        return "state_dicts"
    raise ModelError(
        f"model {name} is a {type(model).__name__}. Give a model file, a torch.nn.Module or a "
        "state_dict"
    )


def _written(
    networks: Mapping[str, nn.Module], folder: Path, shape: Sequence[int] | None
) -> list[Path]:
    """Files with the weights of networks; with their programs, where these differ."""
    weights = [network.state_dict() for network in networks.values()]
    forms = [{name: tensor.shape for name, tensor in state.items()} for state in weights]
    if all(form == forms[0] for form in forms):
        paths = [folder / f"{number}.pt" for number in range(len(networks))]
        for path, state in zip(paths, weights, strict=True):
            torch.save({key: tensor.detach().cpu() for key, tensor in state.items()}, path)
        return paths
    if shape is None:
        raise ModelError(
            "the networks have different weights. Give the shape of one input, such as "
            "shape=(3, 32, 32)"
        )
    paths = []
    for number, (name, network) in enumerate(networks.items()):
        _outputs(network, shape)
        copied = evaluating(copy.deepcopy(network).cpu())
        sizes = ({0: torch.export.Dim("batch")},)
        with told_as(ModelError, f"network {name} cannot be exported", Exception):
            program = torch.export.export(copied, (torch.zeros(2, *shape),), dynamic_shapes=sizes)
        paths.append(folder / f"{number}.pt2")
        torch.export.save(program, paths[-1])
    return paths


def _outputs(network: nn.Module, shape: Sequence[int]) -> int:
    """The number of outputs of a network for inputs of a shape."""
    copied = copy.deepcopy(network).cpu().eval()
    try:
        with torch.no_grad():
            return int(copied(torch.zeros(1, *shape)).shape[-1])
    except (RuntimeError, IndexError, TypeError) as error:
        raise ModelError(
            f"the network does not take inputs of shape {tuple(shape)}: {error}. Check shape"
        ) from None


def _counts(counts: npt.ArrayLike | Path | str | None, folder: Path) -> Path | None:
    """A file of counts."""
    if counts is None or isinstance(counts, Path | str):
        return None if counts is None else Path(counts)
    path = folder / COUNTS
    table = np.asarray(counts)
    if table.dtype.kind == "f" and (table == np.trunc(table)).all() and np.isfinite(table).all():
        table = table.astype(np.int64)
    path.write_text(json.dumps(table.tolist()))
    return path
