"""What a network is tried for before anything trains: that its state is all there is to it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from fedbayes.core import seeds
from fedbayes.core.lazy import raised
from fedbayes.errors import ModelError, NetworkError
from fedbayes.models.network import Network

COUNT = 4
"""Samples of a trial."""


def inputs(shape: tuple[int, ...], count: int = COUNT) -> Iterator[Tensor]:
    """Inputs of this shape to try, one kind after the other: a network may take only some of them.

    Yields:
        Normal numbers, zeros and ones (codes, say), and these as integers; [count, *shape].
    """
    rng = torch.Generator().manual_seed(0)
    yield torch.randn(count, *shape, generator=rng)
    codes = torch.randint(2, (count, *shape), generator=rng)
    yield codes.float()
    yield codes


def _fitting(module: nn.Module, shape: tuple[int, ...], count: int = COUNT) -> Iterator[Tensor]:
    """Inputs to try, real ones in the type of the module's weights."""
    weights = (p.dtype for p in module.parameters() if p.is_floating_point())
    dtype = next(weights, torch.float32)
    return (x.to(dtype) if x.is_floating_point() else x for x in inputs(shape, count))


def materialize(module: nn.Module, shape: tuple[int, ...], name: str) -> None:
    """Give lazy layers shapes and weights, by one pass. A ModelError if the network fails on it."""
    if not any(is_lazy(t) for t in _tensors(module)):
        return
    error: Exception | None = None
    for x in inputs(shape):
        try:
            module.eval()(x.clone())
        except Exception as raised_now:  # whatever code of somebody's own may raise
            error = error or raised_now
        else:
            break
    if any(map(is_lazy, _tensors(module))):
        why = raised(error, name) if error else "a forward pass does not use all of its layers"
        raise ModelError(
            f"model {name!r} has lazy layers, and they get no shape from inputs of shape {shape}: "
            f"{why}. Give the layers their sizes"
        )
    module.train()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def fixed_buffers(module: nn.Module, shape: tuple[int, ...], name: str) -> frozenset[str]:
    """Names of persistent buffers that a training pass does not write to, such as masks.

    The module's buffers are put back as they were.

    Raises:
        ModelError: a parameter is complex, or a buffer that changes is complex or not finite.
    """
    for key, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ModelError(
                f"parameter {key!r} of model {name!r} is complex, but weights must be real "
                "numbers. Store it as a real tensor whose last axis has 2 entries, and use "
                "torch.view_as_complex(...) in forward"
            )
    stored = module.state_dict().keys()
    places = [
        (f"{prefix}.{key}" if prefix else key, owner._buffers, key, buffer)
        for prefix, owner in module.named_modules()
        if not isinstance(owner, _NormBase)
        for key, buffer in owner._buffers.items()
        if buffer is not None
    ]
    places = [place for place in places if place[0] in stored]
    if not places:
        return frozenset()
    tables = [(owner._buffers, dict(owner._buffers)) for owner in module.modules()]
    before = {id(b): (b, b.clone()) for b in module.buffers()}
    versions = [buffer._version for *_, buffer in places]
    try:
        if not _passes(module, shape, training=True):
            return frozenset()  # which is told by whoever uses it
        fixed = frozenset(
            full
            for (full, table, key, buffer), version in zip(places, versions, strict=True)
            if table.get(key) is buffer and buffer._version == version
        )
    finally:
        for table, held in tables:
            table.update(held)
        with torch.no_grad():
            for buffer, values in before.values():
                buffer.copy_(values)
        module.train()
    for full, *_, buffer in places:
        if full in fixed:
            continue
        if buffer.is_complex():
            raise ModelError(
                f"buffer {full!r} of model {name!r} is complex and changes in training, but "
                "clients send real numbers. Store it as a real tensor whose last axis has 2 "
                "entries"
            )
        if buffer.is_floating_point() and not bool(torch.isfinite(buffer).all()):
            raise ModelError(
                f"buffer {full!r} of model {name!r} changes in training and starts with NaN or "
                "infinite values. Start it with finite values"
            )
    return fixed


def _passes(
    module: nn.Module, shape: tuple[int, ...], *, training: bool, seed: int = 0
) -> list[Tensor]:
    """Outputs for the first kind of inputs that the module takes; none if it takes no kind."""
    module.train(training)
    for x in _fitting(module, shape):
        try:
            with torch.no_grad(), seeds.global_rng(seed, "trial"):
                outputs = module(x)
        except Exception:  # whatever code of somebody's own may raise, and does where it is used
            continue
        return [outputs] if isinstance(outputs, Tensor) else []
    return []


def require_registered(
    draw: Callable[[str], nn.Module],
    purpose: str,
    module: nn.Module,
    shape: tuple[int, ...],
    name: str,
) -> None:
    """Check that the outputs of a network depend only on its `state_dict`.

    It is built twice more under different seeds, one of the two is used, and gets the state of
    the other. Then both must compute the same. One has the seed of the network itself, and so the
    same state.

    Args:
        draw: builds the network from the seed for a purpose.
        purpose: of the network itself.
        module: the network, which is left as it is.
        shape: of a sample.
        name: of the network, for errors.

    Raises:
        ModelError: they do not; the text names what is not registered.
    """
    one, other = draw(purpose), draw("trial build")
    if _shared(module, one) or _shared(one, other):
        return  # the factory gives parts of one network again and again
    for seed in (1, 2):
        _passes(other, shape, training=True, seed=seed)
    again, first_state = one.state_dict(), module.state_dict()
    varying = [
        key
        for key, tensor in first_state.items()
        if isinstance(tensor, Tensor)
        and not (key in again and _same(tensor, again[key]))
        and not bool(torch.isnan(tensor).any())
    ]
    if again.keys() != first_state.keys() or varying:
        raise ModelError(
            f"model {name!r} starts with different weights for the same "
            f"seed{f', such as {varying[0]!r}' if varying else ''}. Sample them with the global "
            "generators of PyTorch, NumPy or Python, which are seeded"
        )
    try:
        other.load_state_dict(again)
    except RuntimeError as error:
        raise ModelError(
            f"model {name!r} has a different architecture each time it is built: "
            f"{str(error).splitlines()[-1].strip()}. It must depend only on its arguments"
        ) from None
    same = True
    for training in (False, True):
        answers = [_passes(each, shape, training=training) for each in (one, other)]
        if all(answers):
            (first,), (second,) = answers
            same = same and first.shape == second.shape
            same = same and torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)
    if not same:
        places = _different(_outside(one), _outside(other))
        raise ModelError(
            f"the outputs of model {name!r} do not depend only on its state_dict: two networks "
            f"with the same state differ. {_remedy(places)}"
        )
    if untrained := _untrained(one, shape):
        raise ModelError(
            f"model {name!r} computes with weights that are not registered, so they would neither "
            f"train nor be sent. {_remedy(untrained)}"
        )


def _shared(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have a tensor in common."""
    return not {id(t) for t in _tensors(one)}.isdisjoint(id(t) for t in _tensors(other))


def _remedy(places: list[str]) -> str:
    """What is not registered, and how it would be."""
    if not places:
        return (
            "No attribute differs, so it may be a global variable or an unseeded generator. "
            "Store it in a parameter or a buffer"
        )
    few = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
    return (
        f"Not registered: {few}. Keep layers in nn.ModuleList or nn.ModuleDict, weights in "
        "nn.Parameter, and other tensors in self.register_buffer(name, tensor)"
    )


def _outside(module: nn.Module) -> dict[str, object]:
    """Tensors, arrays, numbers and generators that a module holds outside its state, by path."""
    known = {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}
    found: dict[str, object] = {}
    for prefix, owner in module.named_modules():
        base = f"{prefix}." if prefix else ""
        for key in sorted(owner._non_persistent_buffers_set):
            if (buffer := owner._buffers.get(key)) is not None:
                found[base + key] = buffer
        for key, value in vars(owner).items():
            if key not in _OF_MODULES:
                _collect(value, base + key, known, found, 0)
    return found


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_DEEPEST = 8


def _collect(
    value: object, path: str, known: set[int], found: dict[str, object], depth: int
) -> None:
    """Note what a value holds, by path."""
    if isinstance(value, bool | str | bytes | type(None) | type) or depth > _DEEPEST:
        return
    if isinstance(value, int | float | complex | np.generic):
        found[path] = value
        return
    if id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, Tensor | np.ndarray | Random | np.random.Generator | torch.Generator):
        found[path] = value
    elif isinstance(value, nn.Module):
        for key, tensor in (*value.named_parameters(), *value.named_buffers()):
            _collect(tensor, f"{path}.{key}", known, found, depth + 1)
        for prefix, owner in value.named_modules():
            known.add(id(owner))
            for key, held in vars(owner).items():
                if key not in _OF_MODULES:
                    within = f"{path}.{prefix}.{key}" if prefix else f"{path}.{key}"
                    _collect(held, within, known, found, depth + 1)
    elif isinstance(value, Mapping):
        for key, held in list(value.items()):
            _collect(held, f"{path}[{key!r}]", known, found, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for number, held in enumerate(value):
            _collect(held, f"{path}[{number}]", known, found, depth + 1)
    elif callable(value):
        for number, cell in enumerate(getattr(value, "__closure__", None) or ()):
            _collect(_content(cell), f"{path}'s closure[{number}]", known, found, depth + 1)
    elif hasattr(value, "__dict__"):
        for key, held in list(vars(value).items()):
            _collect(held, f"{path}.{key}", known, found, depth + 1)


def _content(cell: object) -> object:
    """What a cell of a closure holds; nothing if it is empty."""
    try:
        return cell.cell_contents  # type: ignore[attr-defined]
    except ValueError:
        return None


def _different(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """Paths of what two modules hold outside their states and is not the same."""
    paths = dict.fromkeys([*one, *other])
    return [p for p in paths if p not in one or p not in other or not _same(one[p], other[p])]


def _same(one: object, other: object) -> bool:
    """Whether two tensors, arrays, numbers or generators hold the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.detach(), other.detach())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, torch.Generator) and isinstance(other, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, Random) and isinstance(other, Random):
        return one.getstate() == other.getstate()
    if isinstance(one, np.random.Generator) and isinstance(other, np.random.Generator):
        return bool(one.bit_generator.state == other.bit_generator.state)
    return bool(one == other)


def _untrained(module: nn.Module, shape: tuple[int, ...]) -> list[str]:
    """Paths of tensors outside a module's state that want gradients and get them."""
    wanting = {
        path: value
        for path, value in _outside(module).items()
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    }
    if not wanting:
        return []
    module.train()
    for x in _fitting(module, shape):
        try:
            outputs = module(x)
            gradients = torch.autograd.grad(
                outputs.float().sum(), list(wanting.values()), allow_unused=True
            )
        except Exception:  # whatever code of somebody's own may raise, and does where it is used
            continue
        return [p for p, g in zip(wanting, gradients, strict=True) if g is not None]
    return []


def alone(network: Network, *, training: bool) -> str:
    """Why a network cannot take a batch of one sample, in words; empty if it can, or takes none of
    the inputs that are tried.

    Args:
        network: with the shape of a sample.
        training: as in training, or as in evaluation.
    """
    assert network.shape is not None
    for x in inputs(network.shape):
        (x,) = network.prepare({"inputs": x}).values()
        try:
            whole = _outputs(network, x, training=training)
        except NetworkError:
            continue
        try:
            one = _outputs(network, x[:1], training=training)
        except NetworkError as error:
            return str(error)
        if one.shape[1:] != whole.shape[1:]:
            return (
                f"the network maps a batch of 1 sample to outputs of shape {tuple(one.shape)}, and "
                f"{len(x)} samples to {tuple(whole.shape)}"
            )
        return ""
    return ""


def _outputs(network: Network, x: Tensor, *, training: bool) -> Tensor:
    """Outputs of the network at its start, which is left as it is."""
    weights = {n: t.clone() for n, t in {**network.initial, **network.own}.items()}
    with torch.no_grad(), seeds.global_rng(0, "trial", device=network.device):
        return network(network.prepare(weights), x, training=training)


@dataclass(frozen=True)
class Habits:
    """What a network's outputs look like in evaluation, of random inputs."""

    draws: bool = False
    """Whether they differ from one call to the next."""
    together: bool = False
    """Whether those of a sample depend on the others in its batch."""
    softmax: bool = False
    """Whether they are probabilities that add up to 1."""
    sigmoid: bool = False
    """Whether all are between 0 and 1, none of them 0 or 1."""


def habits(network: Network) -> Habits:
    """What is seen of a network's outputs; nothing if it takes none of the inputs tried."""
    assert network.shape is not None
    for x in inputs(network.shape, 16):
        (x,) = network.prepare({"inputs": x}).values()
        weights = network.prepare({**network.initial, **network.own})
        try:
            with torch.no_grad(), seeds.global_rng(0, "trial", device=network.device):
                first, again = network(weights, x), network(weights, x)
                few = network(weights, x[:2])
                large = network({n: 30 * w if w.is_floating_point() else w
                                 for n, w in weights.items()}, x).float()  # fmt: skip
        except (NetworkError, IndexError):
            continue
        draws = not torch.allclose(first, again, rtol=1e-3, atol=1e-5, equal_nan=True)
        within = bool(((large >= 0) & (large <= 1)).all() and ((first > 0) & (first < 1)).all())
        ones = bool(((first.float().sum(1) - 1).abs() < 1e-3).all())
        return Habits(
            draws=draws,
            together=not draws
            and not torch.allclose(first[:2], few, rtol=1e-2, atol=1e-3, equal_nan=True),
            softmax=within and ones and first.shape[1] > 1,
            sigmoid=within and not ones,
        )
    return Habits()
