"""A Gaussian head of networks that share all layers below the last one, from clients' sums."""

from collections.abc import Sequence

import torch
from torch import nn

from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ModelError
from fedbayes.fusion.laplace import features, find_last
from fedbayes.fusion.posterior_settings import HeadSettings
from fedbayes.fusion.posteriors import Posterior
from fedbayes.inference.gaussian_head import GaussianHead, Moments
from fedbayes.likelihoods import Likelihood

_BATCH = 500


def head_moments(
    module: nn.Module, likelihood: Likelihood, samples: Samples
) -> tuple[str, Moments]:
    """Sums of what the last layer of a network reads, by class, and the name of the layer.

    Args:
        module: the network.
        likelihood: what its outputs mean.
        samples: of a client, as the network sees them.

    Raises:
        ModelError: targets are no classes, or the network does not end with a linear layer.
    """
    classes = likelihood.target.classes
    if not classes:
        raise ModelError(
            f"a Gaussian head needs classes, but the likelihood is {likelihood.name}. Leave "
            "--head out"
        )
    name, linear = find_last(module, samples.x[:2])
    parts = [
        Moments.of(features(module, linear, x)[0], y, classes) for x, y in samples.batches(_BATCH)
    ]
    return name, Moments.added(parts)


def gaussian_head(posteriors: Sequence[Posterior], settings: HeadSettings | None = None) -> Tensors:
    """The network with linear discriminants of all clients' features as its last layer.

    Features are what the last layer reads, so all layers below it must be the same in all
    networks: a pretrained extractor, say. The discriminants are those of the rows of all clients
    together, whatever the partition (`fedbayes.inference.gaussian_head`).

    Raises:
        ModelError: a client sent no sums, or its network differs below the last layer.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.core.tensors import Samples
        >>> from fedbayes.fusion.heads import gaussian_head
        >>> from fedbayes.fusion.curvature import posterior
        >>> from fedbayes.fusion.heads import head_moments
        >>> from fedbayes.likelihoods import build_likelihood
        >>> from dataclasses import replace
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
        >>> network = nn.Sequential(nn.Linear(3, 2))
        >>> sent = posterior(network, likelihood, samples)
        >>> sent = replace(sent, head=dict([head_moments(network, likelihood, samples)]))
        >>> gaussian_head([sent, sent])["0.weight"].shape
        torch.Size([2, 3])
    """
    settings = settings or HeadSettings()
    first = posteriors[0]
    named = [one.source or f"posterior {n}" for n, one in enumerate(posteriors, 1)]
    for name, one in zip(named, posteriors, strict=True):
        if not one.head:
            raise ModelError(
                f"{name} has no sums of features. Make it with fedbayes posterior --head"
            )
        if one.head.keys() != first.head.keys() or not one.weights.keys() >= {
            f"{layer}.weight" if layer else "weight" for layer in one.head
        }:
            raise ModelError("the networks have different last layers, so they have no common head")
    ((layer, _),) = first.head.items()
    weight, bias = (f"{layer}.{part}" if layer else part for part in ("weight", "bias"))
    for name, one in zip(named, posteriors, strict=True):
        _require_shared(first.weights, one.weights, {weight, bias}, name, named[0])
    if bias not in first.weights:
        raise ModelError(f"linear discriminants need a bias, but the layer {layer!r} has none")
    sums = [one.head[layer] for one in posteriors]
    if len({(own.sums.shape, own.products.shape) for own in sums}) > 1:
        raise ModelError("the files have sums of different features or classes")
    head = GaussianHead.fit(sums, settings.prior_rows, settings.mean_rows)
    table = torch.cat([head.linear()[0], head.linear()[1][:, None]], dim=1)
    if len(first.weights[weight]) == 1:  # the logit of the second class
        table = table[1:] - table[:1]
    if table[:, :-1].shape != first.weights[weight].shape:
        raise ModelError(f"the sums of features do not fit the layer {layer!r}")
    return {
        **first.weights,
        weight: table[:, :-1].to(first.weights[weight]),
        bias: table[:, -1].to(first.weights[bias]),
    }


def _require_shared(first: Tensors, other: Tensors, head: set[str], own: str, one: str) -> None:
    """See that a network has the layers of the first one below the last."""
    for name, tensor in first.items():
        if name not in head and not (name in other and torch.equal(tensor, other[name])):
            raise ModelError(
                f"{name!r} of {own} differs from {one}. Sums of features can be added only if "
                "all layers below the last are the same. Use --method function for others"
            )
