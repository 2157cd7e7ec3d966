"""Posteriors in files: the statistics that a client computes on its own data, and sends."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedbayes.config.config import Config
from fedbayes.core import seeds
from fedbayes.core.files import read_bytes, writable, write_beside
from fedbayes.core.messages import decode_file, metadata
from fedbayes.core.seals import check_seal, sealed
from fedbayes.core.tensors import Samples, Tensors, named, pack, part
from fedbayes.core.wording import listed
from fedbayes.errors import DataError, MessageError, ModelError, told_as, warn
from fedbayes.fusion.curvature import posterior
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.heads import head_moments
from fedbayes.fusion.posterior_settings import CurvatureSettings
from fedbayes.fusion.posteriors import KroneckerFactors, Posterior
from fedbayes.inference.gaussian_head import Moments
from fedbayes.likelihoods import Likelihood
from fedbayes.likelihoods.temperature import has_temperature, temperature_sums
from fedbayes.models import (
    CARD,
    POSTERIOR,
    ModelSettings,
)
from fedbayes.models.files import kept_order
from fedbayes.models.open import OpenedWeights, absent_classes, open_dense, open_weights
from fedbayes.models.steps import module_size
from fedbayes.storage.card import Card
from fedbayes.workflows.serve.evaluation_set import (
    EvaluationSet,
    find_training,
    is_program,
    refuse_own_order,
)
from fedbayes.workflows.serve.inputs_told import TOLD, InputsTold, header
from fedbayes.workflows.serve.model_files import ModelFiles, read_with_card
from fedbayes.workflows.serve.output_order import warn_of_order

VERSION = "1"
"""Of the form of the files."""
FORMATS = (".safetensors",)
_BATCH = 1000
Found = TypeVar("Found")


@dataclass(frozen=True)
class PosteriorJob:
    """A posterior of a model on a client's data into a file; `fedbayes posterior`."""

    model: Path
    data: Path
    out: Path
    given: Sequence[str] = ()
    """Settings of `[data]` and `[task]`, how the data are read, and of `[model]`, which network
    it is, for files that do not say so."""
    mean: Sequence[float] = ()
    """What the network's inputs were lessened by, for files that do not say so: a number, or one
    for each channel or feature."""
    std: Sequence[float] = ()
    """What they were divided by then."""
    settings: CurvatureSettings = field(default_factory=CurvatureSettings)
    seed: int = 0
    temperature: Path | None = None
    """Rows of the client that the model did not train on, to fit a temperature to."""
    head: bool = False
    """Whether sums of what the last layer reads are in the file, by class."""

    def run(self, watch: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Compute and write it.

        Args:
            watch: called with samples done and of all.

        Returns:
            What the file holds, in short.

        Raises:
            FedbayesError: what is wrong with an option or a file.
        """
        read = [path for path in (self.model, self.data, self.temperature) if path is not None]
        writable(self.out, "the posterior", FORMATS, read)
        of_network = [entry for entry in self.given if entry.strip().startswith("model.")]
        chosen = Config.load(None, of_network).model if of_network else None
        found = find_training(self.model, self.data, self.given, (self.mean, self.std))
        weights, card = read_with_card(self.model, found.trusted)
        refuse_own_order(card, str(self.model))
        seen = found.preprocessing
        before = InputsTold.read(self.model)
        stated = card is not None or bool(self.mean or self.std or (before and before.mean))
        if not stated:
            warn(
                f"{self.model} does not describe its standardization, so samples are not "
                "standardized. Set --mean and --std as in training"
            )
        samples = Samples(seen.apply(found.samples.x), found.samples.y)
        module, names = open_module(
            weights, card, chosen, seen.shape, found.likelihood, str(self.model)
        )
        if card is None or card.by_hand:
            self._doubt_order(module, found.likelihood, samples)
        fitted = None if self.temperature is None else self._temperature(module, found)
        rng = seeds.torch_rng(self.seed, "curvature")
        result = posterior(module, found.likelihood, samples, self.settings, rng=rng, watch=watch)
        head = dict([head_moments(module, found.likelihood, samples)]) if self.head else {}
        result = replace(result, temperature=fitted, head=head)
        told = None
        if card is None or card.by_hand:
            told = InputsTold.of(seen, found.samples.x, stated)
        size = write_posterior(self.out, _renamed(result, names), card, told)
        return {
            "samples": result.samples,
            "layers": list(_renamed(result, names).factors),
            "parameters": module_size(module),
            "bytes": size,
            "temperature": fitted,
            "features": sum(own.sums.shape[1] for own in head.values()),
        }

    def _doubt_order(self, module: nn.Module, likelihood: Likelihood, samples: Samples) -> None:
        """Print a warning if outputs seem to be in another order than the classes of the rows."""
        target = likelihood.target
        if not target.classes:
            return
        with torch.no_grad():
            outputs = torch.cat([frozen(module)(x) for x in torch.split(samples.x, _BATCH)])
        says = likelihood.mean(outputs[None]).argmax(-1)
        warn_of_order(self.model, says, samples.y, target)

    def _temperature(self, module: nn.Module, data: EvaluationSet) -> float:
        """The temperature of the client's predictions on rows that it did not train on."""
        likelihood = data.likelihood
        if not has_temperature(likelihood):
            raise ModelError(
                f"--temperature {self.temperature}: a model of the likelihood {likelihood.name} "
                "has no temperature. Leave the option out"
            )
        assert self.temperature is not None
        if self.temperature.resolve() == self.data.resolve():
            warn(
                f"--temperature {self.temperature} has the rows of --data. If the model trained on "
                "them, its temperature is too low: give rows that were kept aside"
            )
        scaling = (self.mean, self.std)
        found = find_training(self.model, self.temperature, self.given, scaling, data)
        rows = found.preprocessing.apply(found.samples.x)
        with torch.no_grad():
            outputs = torch.cat([frozen(module)(some) for some in torch.split(rows, _BATCH)])
        sums = temperature_sums(likelihood, outputs[None], found.samples.y)
        with told_as(ModelError, f"--temperature {self.temperature}", DataError):
            return sums.with_prior().temperature()


def open_module(
    weights: Tensors,
    card: Card | None,
    settings: ModelSettings | None,
    shape: tuple[int, ...],
    likelihood: Likelihood,
    source: str,
) -> tuple[nn.Module, dict[str, str]]:
    """Return the network that weights are of, with these weights.

    Args:
        weights: as a file has them.
        card: of the file.
        settings: its network, instead of the one that the card names; without either it is fully
            connected with ReLU.
        shape: of a sample.
        likelihood: what its outputs mean.
        source: what to call the file in errors.

    Returns:
        The module, and the file's names of its tensors by those of the module, where these differ.

    Raises:
        ModelError: the weights are not of such a network.
    """
    own = None if card is None else card.model.get("name")
    if settings is not None and settings.only_named and settings.name == own:
        settings = None  # its name alone says no more than that it may be imported
    if settings is None and card is not None:
        settings = card.network("If you trust it, add --model")
    if settings is None:
        module, names = open_dense(weights, shape, likelihood, source)
        for name in names.values():
            if not name.endswith((".weight", ".bias")):
                raise ModelError(
                    f"{source}: {name!r} is not the name of a layer's weight, such as "
                    "'fc1.weight'. Save the state_dict of a module"
                )
        return module, names
    frozen = None if card is None else card.frozen
    opened = open_weights(weights, settings, shape, likelihood, source, frozen=frozen)
    if (outputs := _outputs(opened, likelihood)) and (way := absent_classes(outputs, likelihood)):
        raise ModelError(f"{source} has {outputs} outputs{way}")
    # Shared tensors have several names in the module, and one here.
    opened.network.module.load_state_dict(opened.require(), strict=False)
    return opened.network.module, dict(opened.names)


def _outputs(opened: OpenedWeights, likelihood: Likelihood) -> int:
    """The outputs of a file's network where only their number keeps it from fitting; else 0."""
    found: set[int] = set()
    for name, wanted in opened.network.start.items():
        own = None if opened.named is None else opened.named[name]
        if own is None or own.shape[1:] != wanted.shape[1:]:
            return 0
        if own.shape != wanted.shape:
            found.add(len(own) if len(wanted) == likelihood.outputs else 0)
    return found.pop() if len(found) == 1 else 0


def _renamed(found: Posterior, names: dict[str, str]) -> Posterior:
    """A posterior with the file's names of tensors."""

    def of(name: str) -> str:
        return names.get(name, name)

    def layers(table: dict[str, Found]) -> dict[str, Found]:
        return {of(f"{n}.weight").removesuffix(".weight"): own for n, own in table.items()}

    return replace(
        found,
        weights={of(name): tensor for name, tensor in found.weights.items()},
        diagonal={of(name): tensor for name, tensor in found.diagonal.items()},
        factors=layers(found.factors),
        head=layers(found.head),
    )


def write_posterior(
    path: Path, found: Posterior, card: Card | None = None, told: InputsTold | None = None
) -> int:
    """Write a posterior, whole or not at all, and return the length of the file.

    `read_model` and all that reads models by it find the weights in such a file.
    """
    tensors = {
        **named("weights", found.weights),
        **named("inputs", {layer: f.inputs for layer, f in found.factors.items()}),
        **named("outputs", {layer: f.outputs for layer, f in found.factors.items()}),
        **named("diagonal", found.diagonal),
        **{
            f"head/{n}/{layer}": t
            for layer, own in found.head.items()
            for n, t in pack(own).items()
        },
        "samples": torch.tensor(found.samples),
    }
    if found.counts is not None:
        tensors["counts"] = found.counts
    if found.temperature is not None:
        tensors["temperature"] = torch.tensor(found.temperature, dtype=torch.float64)
    text = {POSTERIOR: VERSION, **kept_order(found.weights)}
    text |= {} if card is None else {CARD: card.dump()}
    text |= {} if told is None else {TOLD: told.dump()}
    write_beside(path, sealed(tensors, text))
    return path.stat().st_size


def read_posterior(path: Path, files: ModelFiles | None = None) -> tuple[Posterior, Card | None]:
    """A posterior from a file, checked: a stranger's factors are what factors can be.

    Args:
        path: the file.
        files: those whose weights were read before.

    Raises:
        ModelError: it is absent, damaged, or holds none.

    Examples:
        >>> from pathlib import Path
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.core.tensors import Samples
        >>> from fedbayes.fusion.curvature import posterior
        >>> from fedbayes.likelihoods import build_likelihood
        >>> from fedbayes.workflows.fuse.posterior_files import read_posterior, write_posterior
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
        >>> found = posterior(nn.Sequential(nn.Linear(3, 2)), likelihood, samples)
        >>> length = write_posterior(Path("posterior.safetensors"), found)
        >>> read_posterior(Path("posterior.safetensors"))[0].samples
        20
    """
    files = files or ModelFiles()
    _, card = files[path]
    data = read_bytes(path)
    if metadata(data).get(POSTERIOR) != VERSION:
        raise ModelError(
            f"{path} has only weights, or a posterior of another version. Create one at the site "
            f"of its data: fedbayes posterior {path} --data FILE -o client.safetensors"
        )
    with told_as(ModelError, f"{path} is damaged or not a posterior", MessageError):
        check_seal(data)
        content = decode_file(data, plain=True)
    samples, counts = content.get("samples"), content.get("counts")
    if samples is None or samples.ndim or samples.dtype != torch.int64 or samples < 1:
        raise ModelError(f"{path} has no number of samples")
    if counts is not None and (
        counts.ndim != 1
        or counts.dtype != torch.int64
        or bool((counts < 0).any())
        or int(counts.sum()) != int(samples)
    ):
        raise ModelError(f"{path} has counts of classes that do not add to its samples")
    warmth = content.get("temperature")
    if warmth is not None and (warmth.ndim or not 0 < float(warmth) < math.inf):
        raise ModelError(f"{path} has a temperature that is not a number above 0")
    weights, diagonal = part(content, "weights"), part(content, "diagonal")
    inputs, outputs = part(content, "inputs"), part(content, "outputs")
    if inputs.keys() != outputs.keys():
        raise ModelError(f"{path} has input factors and output factors of different layers")
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{path}: {name!r} has NaN or infinite values")
    for name, tensor in diagonal.items():
        if tensor.dtype != torch.float32 or not bool(
            (tensor >= 0).all() & (tensor < torch.inf).all()
        ):
            raise ModelError(
                f"{path}: the diagonal of {name!r} has values that are not numbers of 0 or more"
            )
    for name, moment in (*inputs.items(), *outputs.items()):
        if not _is_moment(moment):
            raise ModelError(f"{path}: a factor of {name!r} is not a matrix of second moments")
    factors = {name: KroneckerFactors(inputs[name], outputs[name]) for name in inputs}
    temperature = None if warmth is None else float(warmth)
    head = _head(part(content, "head"), path, int(samples))
    found = Posterior(
        weights, int(samples), counts, factors, diagonal, temperature, head, str(path)
    )
    order = files.orders.get(path)
    return found if order is None else order.posterior(found), card


def _head(told: Tensors, path: Path, samples: int) -> dict[str, Moments]:
    """Sums of features by the name of a layer, checked."""
    found: dict[str, Moments] = {}
    for layer in {name.partition("/")[2] for name in told}:
        own = {n.partition("/")[0]: t for n, t in told.items() if n.partition("/")[2] == layer}
        if own.keys() != {"counts", "sums", "products"}:
            raise ModelError(f"{path} lacks some sums of features of {layer!r}")
        moments = found[layer] = Moments(own["counts"], own["sums"], own["products"])
        if trouble := moments.trouble(samples):
            raise ModelError(f"{path}: sums of features of {layer!r}: {trouble}")
    if len(found) > 1:
        raise ModelError(
            f"{path} has sums of features of several layers. Only the last layer can have them"
        )
    return found


FROM_FILES = "counts of samples are those in the files"
"""What is said where they are taken from there."""


def sent_counts(
    paths: Sequence[Path], files: ModelFiles, *, by_class: bool = True
) -> npt.NDArray[np.int64] | None:
    """Samples of each client and class [S, K], where all files say so: posteriors, or by cards.

    Args:
        paths: the files.
        files: those whose weights were read before.
        by_class: whether they are wanted by class; else they are [S, 1], and all posteriors say
            them.

    Raises:
        ModelError: a file is damaged, or they count other classes.
    """
    found, without = [], []
    for path in paths:
        counts: Sequence[int] | Tensor | None = None
        if is_program(path):
            pass
        elif is_posterior(path):
            sent = read_posterior(path, files)[0]
            counts = [sent.samples] if not by_class else sent.counts
        elif (card := files[path][1]) is not None:
            counts = card.counts
        if counts is None:
            without.append(path)
            continue
        table = np.array(counts)
        found.append(table if by_class else table.sum(keepdims=True))
    if found and without:
        warn(
            f"counts of samples in {len(found)} files are not used, since {listed(without, 3)} "
            "has none. Give all of them with --counts"
        )
    if without:
        return None
    if len({len(row) for row in found}) > 1:
        raise ModelError("the files have counts of different numbers of classes")
    return np.stack(found)


def sent_temperatures(paths: Sequence[Path], files: ModelFiles) -> list[float | None]:
    """The temperature of each client [S]: that of its posterior, else that of its card.

    Raises:
        ModelError: a file is damaged.
    """
    found: list[float | None] = []
    for path in paths:
        if is_program(path):
            found.append(None)
            continue
        sent = read_posterior(path, files)[0].temperature if is_posterior(path) else None
        card = files[path][1]
        found.append(card.temperature if sent is None and card is not None else sent)
    return found


def alike(models: Sequence[Path]) -> InputsTold | None:
    """What posteriors of models without cards say of their inputs; None unless all say it.

    Raises:
        ModelError: two have other classes, another order of them, or another standardization.
    """
    seen: dict[Path, InputsTold] = {}
    for path in models:
        if (own := InputsTold.read(path)) is not None:
            seen[path] = own
    if not seen:
        return None
    first, base = next(iter(seen.items()))
    for path, own in seen.items():
        if own.names != base.names:
            raise ModelError(
                f"{path} has the targets {listed(own.names)}, and {first} has "
                f"{listed(base.names)}. Give fedbayes posterior all classes in the order of the "
                "outputs: --set data.classes=a,b,c"
            )
        if (own.mean, own.std) != (base.mean, base.std):
            raise ModelError(
                f"{path} and {first} have different standardizations, but fused models need the "
                "same inputs. Give fedbayes posterior the same --mean and --std"
            )
    if len(seen) < len(models):
        return None
    bounds = base.bounds if all(own.bounds for own in seen.values()) else ()
    return base._replace(bounds=bounds)


def is_posterior(path: Path) -> bool:
    """Whether a file says that it is a posterior; nothing else is checked."""
    return POSTERIOR in header(path)


def _is_moment(matrix: Tensor) -> bool:
    """Whether a matrix is symmetric and nowhere negative, but for rounding."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.dtype != torch.float32:
        return False
    if not bool(torch.isfinite(matrix).all()) or not matrix.numel():
        return False
    exact = matrix.double()
    largest = float(exact.abs().max())
    if float((exact - exact.T).abs().max()) > 1e-4 * largest:
        return False
    ridge = max(1e-4 * largest, 1e-300) * torch.eye(len(exact), dtype=exact.dtype)
    return int(torch.linalg.cholesky_ex(exact + ridge).info) == 0
