"""Networks of any kind from the files of silos, and what goes into them."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedbayes import models
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Tensors
from fedbayes.core.wording import describe, listed, size
from fedbayes.data import Preprocessing
from fedbayes.data.tokens import Tokens
from fedbayes.errors import ModelError, warn
from fedbayes.likelihoods import Likelihood, build_likelihood
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.models import MLP, ModelSettings, dense_layers, read_program
from fedbayes.models.open import open_dense, open_weights
from fedbayes.models.resize import with_weights
from fedbayes.storage.card import Card, network_outputs
from fedbayes.workflows.serve.evaluation_set import is_program, require_answers, stated
from fedbayes.workflows.serve.model_files import ModelFiles, each_once, read_counts


@dataclass(frozen=True)
class Seen:
    """What the command line says of inputs and outputs, where files do not."""

    shape: tuple[int, ...] | None = None
    """Of one input."""
    mean: tuple[float, ...] = ()
    """Of each channel or feature; 0 by default."""
    std: tuple[float, ...] = ()
    """Likewise; 1 by default."""
    classes: int | None = None
    """Number of outputs."""


@dataclass(frozen=True)
class ClientModels:
    """The networks that silos handed over."""

    networks: dict[str, nn.Module]
    """By path, in evaluation mode."""
    like: nn.Module
    """The network whose graph the fused one has."""
    settings: ModelSettings | None
    """Which that is; None for the graph of a program or layers of any widths."""
    preprocessing: Preprocessing
    """What they see of a raw sample, and what they predict."""
    likelihood: Likelihood
    card: Card | None
    """That of the first, if all have one."""
    programs: bool
    """Whether they are programs, which take raw samples."""
    told: bool
    """Whether it is known what raw samples are, by cards or by the user."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Of tensors, as the file of `like` has them, by those of the network."""
    clients: Mapping[str, str] = field(default_factory=dict)
    """Whose network each file is, by path, where it says so."""

    @property
    def short(self) -> dict[str, str]:
        """Short names of the networks by path."""
        return short_names({path: self.clients.get(path, "") for path in self.networks})

    def example(self) -> Tensor:
        """Two inputs, as the networks see them."""
        seen = self.preprocessing
        return seen.apply(seen.example(2, torch.Generator().manual_seed(0)))

    def written(self, weights: Tensors) -> Tensors:
        """Weights of the fused network under the names that a file of it is to have."""
        return OrderedDict((self.names.get(name, name), t) for name, t in weights.items())

    def described(self, method: Mapping[str, str]) -> Card:
        """The card of what they were fused to, by this method."""
        own = self.card
        return Card(
            self.preprocessing,
            {}
            if self.dense or self.settings is None
            else self.settings.model_dump(mode="json", exclude={"weights"}),
            dict(method),
            {} if own is None else own.data,
            0,
            outputs=network_outputs(self.likelihood),
            task={} if own is None else own.task,
        )

    @property
    def dense(self) -> bool:
        """Whether the fused network is fully connected, which files say by their shapes."""
        return isinstance(self.like, MLP) and self.likelihood.head() is None


def short_names(clients: Mapping[str, str]) -> dict[str, str]:
    """Names of models by path: the client's (empty if unknown), else the stem of the path, and the
    whole path where that is not unique.
    """
    wanted = {path: name or Path(path).stem for path, name in clients.items()}
    counts = Counter(wanted.values())
    return {path: name if counts[name] == 1 else path for path, name in wanted.items()}


def read_silos(
    paths: Sequence[Path],
    network: ModelSettings | None,
    seen: Seen,
    like: Path | None = None,
    files: ModelFiles | None = None,
    counts: Path | None = None,
) -> ClientModels:
    """Networks from files: weights of a network that is named or that their cards name, weights of
    fully connected networks by their shapes, or programs of `torch.export`.

    Args:
        paths: the files.
        network: of files that do not say theirs.
        seen: of inputs and outputs, where the files do not say.
        like: a file whose network the fused one is to be like; the first by default, or `network`.
        files: those that were read before.
        counts: a file of samples of each model and class, which says how many classes there are
            where nothing else does.

    Raises:
        ModelError: a file cannot be read, is of another network, or too little is known.
    """
    each_once(paths)
    if counts is not None and seen.classes is None:
        files = files or ModelFiles()
        silent = [
            not (read_program(path) if is_program(path) else files[path])[1] for path in paths
        ]
        known = read_counts(counts, paths).shape[1] if all(silent) else 0
        seen = replace(seen, classes=known) if known > 1 else seen
    programs = [is_program(path) for path in paths]
    if any(programs) and not all(programs):
        other = paths[programs.index(False)]
        raise ModelError(
            f"{paths[programs.index(True)]} is a program for raw samples, and {other} a file of "
            "weights for standardized samples. Give all in one form"
        )
    if all(programs):
        return _programs(paths, network, seen, like)
    return _weights(paths, network, seen, like, files or ModelFiles())


def _weights(
    paths: Sequence[Path],
    network: ModelSettings | None,
    seen: Seen,
    like: Path | None,
    files: ModelFiles,
) -> ClientModels:
    card = files.card(paths)
    if card is not None and card.preprocessing.permuted:
        raise ModelError("the networks have different pixel orders, so they cannot be fused")
    found = {str(path): files[path] for path in [*paths, *([like] if like else [])]}
    if card is None and any(own is not None for _, own in found.values()):
        raise ModelError(
            "the files do not show that all models have the same inputs and targets. Leave out "
            "those without a card"
        )
    settings = {name: network or _named_in(own) for name, (_, own) in found.items()}
    preprocessing = _preprocessing(card, seen, [weights for weights, _ in found.values()], network)
    likelihood = (
        card.likelihood if card is not None else build_likelihood("auto", preprocessing.target)
    )
    biases = any(tensor.ndim == 1 for weights, _ in found.values() for tensor in weights.values())
    exact = network is not None and not network.only_named
    opened = {
        name: _module(name, weights, own, settings[name], preprocessing, likelihood, biases, exact)
        for name, (weights, own) in found.items()
    }
    modules = {name: module for name, (module, _) in opened.items()}
    wanted = str(like) if like is not None else next(iter(modules))
    tensors = [tensor for own, _ in found.values() for tensor in own.values()]
    kinds = {t.dtype for t in tensors if t.is_floating_point()} - {torch.float32}
    if kinds:
        others = listed(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        warn(f"the files have {others} weights; the fused ones are computed and written as float32")
    return ClientModels(
        {str(path): modules[str(path)] for path in paths},
        modules[wanted],
        settings[wanted],
        preprocessing,
        likelihood,
        card,
        programs=False,
        told=card is not None or bool(seen.mean or seen.std) or preprocessing.tokens is not None,
        names=opened[wanted][1],
        clients={path: own.client for path, (_, own) in found.items() if own is not None},
    )


def _named_in(card: Card | None) -> ModelSettings | None:
    """The network that a card names; code of somebody's own only if the user named it too."""
    if card is None:
        return None
    return card.network(f"If you trust it, add --model {card.model.get('name')}")


def _preprocessing(
    card: Card | None, seen: Seen, weights: Sequence[Tensors], network: ModelSettings | None
) -> Preprocessing:
    """What networks see: as their cards say, or as the user does."""
    if card is not None:
        own = card.preprocessing
        if seen.shape not in (None, own.shape):
            raise ModelError(
                f"--shape {size(seen.shape or ())} differs from the models' files, which have "
                f"inputs of {size(own.shape)}. Leave it out"
            )
        if seen.mean or seen.std or seen.classes:
            raise ModelError(
                "--mean, --std and --classes work only with files that do not describe their "
                "inputs and outputs. Leave them out"
            )
        return own
    shape, classes = seen.shape, seen.classes
    if shape is None or classes is None:
        try:
            layers = dense_layers(weights[0], "the first model")
        except ModelError:
            ways = {"--shape, such as 3,32,32": shape, "--classes, their number": classes}
            missing = " and ".join(way for way, given in ways.items() if given is None)
            raise ModelError(
                f"the files do not describe the inputs and outputs of the networks. Give {missing}"
            ) from None
        shape = shape or (layers[0].weight.shape[1],)
        classes = classes or len(layers[-1].weight)
    seen = replace(seen, shape=shape, classes=classes)
    if network is None or network.name != "transformers" or len(shape) > 1:
        return preprocessing_of(seen)
    if seen.mean or seen.std:
        raise ModelError("--mean and --std have no effect on texts. Leave them out")
    tokens = Tokens.of("text", str(network.pretrained), *shape)
    return replace(preprocessing_of(seen), tokens=tokens)


def preprocessing_of(seen: Seen) -> Preprocessing:
    """What is seen of images in [0, 1], or of rows in their own units.

    Raises:
        ConfigError: means or standard deviations do not fit the shape.
    """
    shape, classes = seen.shape or (), seen.classes or 0
    target = Target("class", tuple(map(str, range(classes))))
    zeros = (0.0,) * shape[0]
    unscaled = Preprocessing(shape, 1.0, zeros, (1.0,) * shape[0], target)
    told = bool(seen.mean or seen.std) and len(shape) == 3
    return replace(stated(unscaled, seen.mean, seen.std), bounds=(0.0, 1.0) if told else None)


def _module(
    name: str,
    weights: Tensors,
    card: Card | None,
    settings: ModelSettings | None,
    preprocessing: Preprocessing,
    likelihood: Likelihood,
    biases: bool,
    exact: bool,
) -> tuple[nn.Module, Mapping[str, str]]:
    """The network of a file, and the file's names of its tensors by those of the network; one that
    is known by its shapes, if the settings are not `exact`, perhaps with biases.
    """
    shape = preprocessing.shape
    if settings is not None:
        frozen = None if card is None else card.frozen
        opened = open_weights(weights, settings, shape, likelihood, name, frozen=frozen)
        if opened.fits or exact or settings.name != "mlp" or likelihood.head() is not None:
            if opened.named is not None and not opened.fits:
                raise ModelError(
                    f"{opened.unlike()}. Networks of different widths can be fused as programs: "
                    "export each to a .pt2 file (torch.export)"
                )
            return with_weights(opened.network.module, opened.require()), opened.names
    way = ". Check --shape, and --classes or the counts"
    return open_dense(weights, shape, likelihood, name, biases=biases, way=way)


def _programs(
    paths: Sequence[Path], network: ModelSettings | None, seen: Seen, like: Path | None
) -> ClientModels:
    if seen.mean or seen.std:
        raise ModelError(
            "programs take raw samples, so --mean and --std have no effect. Export a module that "
            "standardizes its input itself, and leave them out"
        )
    named = [*paths, *([like] if like is not None and like not in paths else [])]
    found = {str(path): read_program(path) for path in named}
    cards = {name: Card.load(text, name) for name, (_, text) in found.items() if text}
    first = next(iter(cards.values())) if len(cards) == len(found) else None
    if first is not None:
        base, likelihood = first.preprocessing, first.likelihood
        for name, card in cards.items():
            if card.preprocessing.target != base.target:
                odd = f"predicts {describe(card.preprocessing.target)}; {first.source} "
                odd += describe(base.target)
            elif not card.preprocessing.same_inputs(base):
                odd = f"standardizes its inputs differently from {first.source}"
            else:
                continue
            raise ModelError(
                f"{name} {odd}. Give files of weights instead of programs (fedbayes export writes "
                "both), whose classes are reordered by name"
            )
        if not isinstance(likelihood, Categorical):
            raise ModelError(
                f"programs with the likelihood {likelihood.name} return predictions, not outputs "
                "of a network. Give files of weights (fedbayes export writes both)"
            )
    elif seen.shape is None or seen.classes is None:
        raise ModelError("programs of other packages need --shape and --classes")
    else:
        base = preprocessing_of(seen)
        likelihood = build_likelihood("auto", base.target)
    modules: dict[str, nn.Module] = {}
    for name, (module, _) in found.items():
        own = unchecked(module)
        modules[name] = own if first is None else _Raw(own, base)
        require_answers(modules[name], base, name)
    wanted = modules[str(like)] if like is not None else next(iter(modules.values()))
    if network is not None:
        built = models.build(network, base.shape, likelihood.outputs, seed=0)
        wanted = with_weights(built.module, built.whole(built.initial))
    return ClientModels(
        {str(path): modules[str(path)] for path in paths},
        wanted,
        network,
        base,
        likelihood,
        first,
        programs=True,
        told=True,
        clients={path: card.client for path, card in cards.items()},
    )


class _Raw(nn.Module):
    """A program of raw samples, as a network of standardized ones.

    What is fused from it standardizes its samples before they are restored here, so that a missing
    value is the mean, as it is to the program.
    """

    offset: Tensor
    factor: Tensor

    def __init__(self, program: nn.Module, seen: Preprocessing) -> None:
        super().__init__()
        self.program = program
        shape = -1, *(1,) * (len(seen.shape) - 1)
        for name, values in zip(("offset", "factor"), seen.statistics, strict=True):
            self.register_buffer(name, torch.from_numpy(values * seen.scale).reshape(shape))

    def train(self, mode: bool = True) -> "_Raw":
        """As it is: a program, which has one mode, raises an error."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of standardized samples [n, ...]."""
        outputs: Tensor = self.program(x * self.factor + self.offset)
        return outputs


def unchecked(program: nn.Module) -> nn.Module:
    """A program that takes images with values outside of the raw range too, as a fusion makes."""
    graph = getattr(program, "graph", None)
    nodes = [] if graph is None else list(graph.nodes)
    for node in nodes:
        if node.target is torch.ops.aten._assert_async.msg and not node.users:
            graph.erase_node(node)  # type: ignore[union-attr]
    if graph is not None:
        program.recompile()  # type: ignore[operator]
    return program
