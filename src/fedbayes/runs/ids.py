"""Samples that a network uses as ids, as embeddings do, and that are therefore left as they are."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbayes.core.wording import listed
from fedbayes.data import FederatedData
from fedbayes.data.dataset import CHUNK, Array
from fedbayes.data.tables.fitting import raw
from fedbayes.errors import DataError, warn
from fedbayes.models import Network

EXACT = 2**24
"""Whole numbers above it are not exact in float32."""
_ROWS = 32
"""Samples that a network is tried on, in addition to those with the largest numbers."""
_SMALL = 3
"""Ids below it are tried too."""


def whole_numbers(data: FederatedData) -> tuple[Array, Array]:
    """Features that hold whole numbers from 0 in all training samples.

    Returns:
        Whether each does [C], and the largest number of each [C]. Images have none.
    """
    count = data.shape[0]
    whole, most = np.ones(count, bool), np.zeros(count)
    dataset, rows = data.dataset, data.partition.train
    if len(data.shape) > 2 or dataset.x.dtype.kind != "f" or not len(rows):
        return ~whole, most
    for start in range(0, len(rows), CHUNK):
        part = raw(dataset, rows[start : start + CHUNK], data.preprocessing)
        part = part.reshape(*part.shape[:2], -1)
        with np.errstate(invalid="ignore"):
            odd = (part < 0) | (part != np.rint(part))
        whole &= ~(odd & ~np.isnan(part)).any((0, 2))
        most = np.maximum(most, np.nan_to_num(part).max((0, 2)))
        if not whole.any():
            break
    return whole, most


def keep_ids(data: FederatedData, network: Network, whole: Array, most: Array) -> bool:
    """Leave those features as they are that the network uses as ids.

    These are whole numbers to which the outputs have no gradient, and that are cut to whole
    numbers where they are none, as by `x.long()`. To standardize them would make other ids of them.

    Args:
        data: The clients' data; their preprocessing is changed.
        network: Their network.
        whole: Which features hold whole numbers [C].
        most: The largest number of each [C].

    Returns:
        Whether there are such features.

    Raises:
        DataError: An id is too large for float32 or for the network's embedding.
    """
    ids = _used_as_ids(data, network.module, whole, most)
    name, features = data.dataset.name, data.preprocessing.features
    if not ids.any():
        return False
    if most[ids].max() > EXACT:
        raise DataError(
            f"{name}: the id {most[ids].max():,.0f} is not exact in float32. Number ids from 0, "
            f"to at most {EXACT:,}"
        )
    data.keep(ids, tuple(np.where(ids, most, -1.0).tolist()))
    which = "samples" if ids.all() else listed(
        f"'{features[k]}'" if features else f"feature {k}" for k in np.flatnonzero(ids)
    )  # fmt: skip
    warn(
        f"{name}: the network uses {which} as ids (whole numbers up to {most[ids].max():.0f}), so "
        "they are not standardized; data.standardize = 'on' standardizes them"
    )
    return True


def _used_as_ids(data: FederatedData, module: nn.Module, whole: Array, most: Array) -> Array:
    """Which of these features are ids for a network [C]."""
    none = np.zeros_like(whole)
    x = _probe(data, whole)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    x = x.to(device)
    training = module.training
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            before, gradient = _gradient(module, x)
            if gradient is None:
                return whole
            # Large numbers saturate a tanh, which then has no gradient either: small ones do not.
            small = torch.where(_shaped(whole, x), x.detach() % _SMALL, x.detach())
            zero = _flat(gradient, x) & _flat(_gradient(module, small)[1], x)
            found = none.copy()
            for feature in np.flatnonzero(whole & zero):
                found[feature] = _is_cut(module, x, before, int(feature))
            return found
    except Exception as error:  # whatever a user's own network may raise
        sizes = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
        if sizes and isinstance(error, IndexError):
            raise DataError(
                f"{data.dataset.name}: the network fails on ids up to {most[whole].max():.0f} "
                f"({error}); its embeddings have {listed(sizes)} rows. They need one more row "
                "than the largest id, and ids of 0 or more"
            ) from None
        return none
    finally:
        module.train(training)


def _shaped(whole: Array, x: Tensor) -> Tensor:
    """These features as a mask that broadcasts to samples [1, C, ...]."""
    return torch.from_numpy(whole).to(x.device).reshape(1, -1, *(1,) * (x.ndim - 2))


def _flat(gradient: Tensor, x: Tensor) -> Array:
    """Features without a gradient at any sample [C]."""
    zero: Array = (gradient == 0).reshape(*x.shape[:2], -1).all(2).all(0).cpu().numpy()
    return zero


def _probe(data: FederatedData, whole: Array) -> Tensor:
    """Some training samples, in which these features are as they are."""
    rows = data.partition.train
    part = raw(data.dataset, rows[:CHUNK], data.preprocessing)
    largest = np.nan_to_num(part.reshape(*part.shape[:2], -1)).max(2).argmax(0)[:_ROWS]
    chosen = np.unique(np.concatenate([np.arange(min(_ROWS, len(part))), largest]))
    raws = torch.from_numpy(np.array(part[chosen], np.float32))
    seen = data.preprocessing.standardize_(raws.clone(), may_miss=True)
    return torch.where(_shaped(whole, raws), raws.nan_to_num(0.0), seen)


def _gradient(module: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    """Outputs of samples, and their gradient; None if they have none at all."""
    x = x.requires_grad_()
    outputs = module(x * 1)
    if not outputs.requires_grad:
        return outputs.detach(), None
    (gradient,) = torch.autograd.grad(outputs.sum(), x, allow_unused=True)
    x.requires_grad_(False)
    return outputs.detach(), gradient


def _is_cut(module: nn.Module, x: Tensor, before: Tensor, feature: int) -> bool:
    """Whether fractions of a feature do not count, and its whole numbers do."""

    def moved(samples: Tensor) -> Tensor:
        samples = samples.clone()
        samples[:, feature] += 0.25
        return samples

    with torch.no_grad():
        other = x.clone()
        other[:, feature] = x[:, feature].roll(1, 0)
        after = module(other)
        # Units that are off at all samples have no gradient either: at others they are on.
        cut = torch.equal(module(moved(x)), before) and torch.equal(module(moved(other)), after)
        return cut and not torch.equal(after, before)
