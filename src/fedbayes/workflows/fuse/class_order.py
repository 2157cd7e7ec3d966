"""Networks whose classes have the same names in another order: their outputs, reordered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.core.wording import describe, listed
from fedbayes.errors import ModelError
from fedbayes.fusion.posteriors import KroneckerFactors, Posterior
from fedbayes.inference.gaussian_head import Moments
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.multilabel import Multilabel
from fedbayes.models import dense_layers, named_as
from fedbayes.models.open import open_weights
from fedbayes.models.resize import with_weights
from fedbayes.models.units import find_units
from fedbayes.storage.card import Card


@dataclass(frozen=True)
class ClassOrder:
    """How the outputs of a network come into another order."""

    index: Tensor
    """Output j of the reordered network is output `index[j]` of the network, int64 [outputs]."""
    tensors: tuple[str, ...]
    """Those with an entry for each output along the first axis."""

    def weights(self, weights: Tensors) -> Tensors:
        """The weights of the reordered network, in the same order of layers."""
        moved = {name: weights[name][self.index] for name in self.tensors if name in weights}
        return type(weights)((name, moved.get(name, t)) for name, t in weights.items())

    def counts(self, found: Sequence[int] | None) -> tuple[int, ...] | None:
        """Samples of each class, of the reordered network."""
        return None if found is None else tuple(found[k] for k in self.index.tolist())

    def posterior(self, found: Posterior) -> Posterior:
        """What a client sends, of the reordered network."""
        factors = dict(found.factors)
        for layer in {name.rpartition(".")[0] for name in self.tensors} & factors.keys():
            outputs = factors[layer].outputs[self.index][:, self.index]
            factors[layer] = KroneckerFactors(factors[layer].inputs, outputs)
        return replace(
            found,
            weights=self.weights(found.weights),
            counts=None if found.counts is None else found.counts[self.index],
            factors=factors,
            diagonal=self.weights(found.diagonal),
            head={
                layer: Moments(own.counts[self.index], own.sums[self.index], own.products)
                for layer, own in found.head.items()
            },
        )


def class_order(weights: Tensors, card: Card, names: Sequence[str], source: str) -> ClassOrder:
    """How outputs of a network come into the order of these names.

    Args:
        weights: as its file has them.
        card: of the file.
        names: of the same classes or labels in the wanted order.
        source: what to call the file in errors.

    Raises:
        ModelError: it cannot be told which weights are of which output.
    """
    own = card.preprocessing.target.names
    index = torch.tensor([own.index(name) for name in names])
    likelihood = card.likelihood
    way = f"Train it with data.classes = {listed(names)}"
    if not isinstance(likelihood, Categorical | Multilabel):
        raise ModelError(
            f"{source} has its classes in another order, and the likelihood {likelihood.name} has "
            f"no output per class. {way}"
        )
    found = _dense(weights, card, source) or _traced(weights, card, source)
    if not found:
        raise ModelError(
            f"{source} has its classes in another order, and the weights of each class are "
            f"unknown. {way}"
        )
    return ClassOrder(index, found)


def _dense(weights: Tensors, card: Card, source: str) -> tuple[str, ...]:
    """The tensors of the last layer of a fully connected network; none of another one."""
    if card.model.get("name", "mlp") != "mlp":
        return ()
    last = dense_layers(weights, source)[-1]
    return (last.name, last.bias_name)


def _traced(weights: Tensors, card: Card, source: str) -> tuple[str, ...]:
    """The same of any network, by a trace of it; none where the trace does not tell."""
    settings = card.network(f"If you trust it, add --model {card.model.get('name')}")
    assert settings is not None
    seen, likelihood = card.preprocessing, card.likelihood
    opened = open_weights(weights, settings, seen.shape, likelihood, source, frozen=card.frozen)
    if not opened.fits:
        return ()
    network, whole, named = opened.network, opened.weights, opened.require()
    example = seen.apply(seen.example(3, torch.Generator().manual_seed(0)))
    module = with_weights(network.module, named)
    groups = [group for group in find_units(module, example).groups if group.output]
    plain = tuple(range(likelihood.outputs))
    if len(groups) != 1 or any(axis.axis or axis.units != plain for axis in groups[0].owned):
        return ()
    moved = tuple(opened.names[axis.tensor] for axis in groups[0].owned)
    # See that nothing else is of single outputs.
    index = torch.tensor(plain[::-1])
    other = ClassOrder(index, moved).weights(whole)
    turned = named_as(other, network.module)
    if turned is None or not moved or not set(moved) <= weights.keys():
        return ()
    with torch.no_grad():
        before, after = module(example), with_weights(network.module, turned)(example)
    return moved if torch.allclose(before[:, index], after, rtol=1e-4, atol=1e-5) else ()


def refuse_other_classes(card: Card, first: Card, one: str, other: str) -> None:
    """See that two models have the same classes in any order, or raise a ModelError."""
    here, there = card.preprocessing.target, first.preprocessing.target
    if here.kind == there.kind and sorted(here.names) == sorted(there.names):
        return
    raise ModelError(
        f"{one} predicts {describe(here)}; {other} predicts {describe(there)}. Fuse models with "
        "the same classes or targets. Set data.classes to give a run classes that its data lack"
    )
