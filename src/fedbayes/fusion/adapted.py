"""A frozen network with low-rank changes of its layers, and what goes into these layers."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.fusion.low_rank import LowRank
from fedbayes.models.hooks import watched

Mask = Callable[[Tensor], Tensor | None]
"""Which of the tokens of inputs [n, length] count, bool [n, length]; None: there are no tokens."""
PORTION = 64
"""Inputs that go through a network at once."""


class AdaptedLayer(nn.Module):
    """A layer and its low-rank change, of which only the change trains."""

    def __init__(self, layer: nn.Module, change: LowRank) -> None:
        super().__init__()
        self.layer, self.scale = layer, change.scale
        self.a = nn.Parameter(change.a.detach().float().clone())
        self.b = nn.Parameter(change.b.detach().float().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., out] at inputs [..., in]."""
        found: Tensor = self.layer(x)
        return found + self.scale * (x @ self.a.T) @ self.b.T

    @property
    def change(self) -> LowRank:
        """The change as it is now."""
        return LowRank(self.a.detach(), self.b.detach(), self.scale)


def adapted(
    base: nn.Module, changes: Mapping[str, LowRank], saved: Tensors, source: str
) -> nn.Module:
    """A network that shares the unchanged weights of another.

    Args:
        base: the network, or a module that has it as `network`.
        changes: of its layers, by name.
        saved: tensors that take the place of others, by name; they train too.
        source: what to call the adapter in errors.

    Raises:
        ModelError: the network has no such layers or tensors, or of other shapes.
    """
    shared = {id(t): t.detach() for t in (*base.parameters(), *base.buffers())}
    memo: dict[int, object] = {
        id(p): nn.Parameter(shared[id(p)], requires_grad=False) for p in base.parameters()
    }
    memo |= {id(b): b for b in base.buffers()}
    network = copy.deepcopy(base, memo)
    inside = within(network)
    for name, change in changes.items():
        layer = found_layer(inside, name, source)
        shape = (len(change.b), change.a.shape[1])
        if widths(layer) != shape:
            raise ModelError(
                f"{source} changes the layer {name} with {shape[1]} inputs and {shape[0]} "
                f"outputs, but that of the base network has {widths(layer)}. It has another base "
                "network"
            )
        place, _, last = name.rpartition(".")
        setattr(inside.get_submodule(place), last, AdaptedLayer(layer, change))
    # A tensor in two places, such as tied embeddings, is replaced in one of them, as PEFT does.
    own = dict(inside.named_parameters(remove_duplicate=False))
    for name, tensor in saved.items():
        if name not in own or own[name].shape != tensor.shape:
            known = str(tuple(own[name].shape)) if name in own else "none"
            raise ModelError(
                f"{source} has {name!r} of shape {tuple(tensor.shape)}, but the base network "
                f"{known}. It has another base network"
            )
        place, _, last = name.rpartition(".")
        setattr(inside.get_submodule(place), last, nn.Parameter(tensor.detach().float().clone()))
    return network.eval()


def within(network: nn.Module) -> nn.Module:
    """The network of a module that wraps one as `network`; else the module."""
    inside = getattr(network, "network", network)
    return inside if isinstance(inside, nn.Module) else network


def found_layer(network: nn.Module, name: str, source: str) -> nn.Module:
    """A layer of a network, by name. Raises a ModelError if there is none."""
    try:
        return network.get_submodule(name)
    except AttributeError:
        raise ModelError(
            f"{source} changes the layer {name}, which the base network does not have. It has "
            "another base network"
        ) from None


def widths(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a dense layer; (0, 0) of any other."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(layer, nn.Embedding):
        return 0, 0
    turned = not isinstance(layer, nn.Linear)  # Conv1D of transformers has [in, out]
    return (weight.shape[1], weight.shape[0]) if turned else (weight.shape[0], weight.shape[1])


def changes_of(network: nn.Module) -> dict[str, LowRank]:
    """The changes in a network of `adapted`, by layer."""
    return {
        name: layer.change
        for name, layer in within(network).named_modules()
        if isinstance(layer, AdaptedLayer)
    }


@torch.no_grad()
def second_moments(
    network: nn.Module,
    layers: Sequence[str],
    batches: Sequence[Tensor],
    mask: Mask,
    constant: frozenset[str] = frozenset(),
    watch: Callable[[int], object] = lambda done: None,
    outputs: list[Tensor] | None = None,
) -> dict[str, Tensor]:
    """E[x xᵀ] of the inputs of layers, over all tokens that count, float64 [in, in].

    Args:
        network: in evaluation mode.
        layers: their names.
        batches: inputs of the network.
        mask: which tokens count.
        constant: layers whose inputs get a 1 behind them [in + 1, in + 1], as biases want it.
        watch: called with the batches done.
        outputs: takes up what the network answers.
    """
    totals: dict[str, Tensor] = {}
    counts = dict.fromkeys(layers, 0)
    given: list[Tensor | None] = [None]
    latest: list[tuple[Tensor, object, Tensor, Tensor]] = []  # query, key and value have one input

    def add(name: str, _: nn.Module, got: tuple[Tensor, ...], __: Tensor) -> None:
        x, tokens = got[0], given[0]
        state = x._version, name in constant  # x may have been changed in place since
        if latest and latest[0][0] is x and latest[0][1] == state:
            rows, found = latest[0][2:]
        else:
            rows = x
            if tokens is not None and x.ndim == 3 and x.shape[:2] == tokens.shape:
                rows = x[tokens]
            rows = rows.reshape(-1, x.shape[-1]).float()
            if name in constant:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
            with torch.autocast(x.device.type, enabled=False):
                found = (rows.T @ rows).double()
            latest[:] = [(x, state, rows, found)]
        counts[name] += len(rows)
        totals[name] = totals[name] + found if name in totals else found

    with watched({name: within(network).get_submodule(name) for name in layers}, add):
        for done, x in enumerate(batches, 1):
            given[0] = mask(x)
            said = network(x)
            if outputs is not None:
                outputs.append(said)
            watch(done)
    for name in layers:
        if name not in totals:
            raise ModelError(
                f"the network does not use the layer {name} that an adapter changes. Use --method "
                "svd"
            )
    return {name: total / counts[name] for name, total in totals.items()}


@torch.no_grad()
def last_layer(
    network: nn.Module, layers: Sequence[str], batches: Sequence[Tensor]
) -> tuple[str, Tensor, Tensor] | None:
    """The layer among some that gives the outputs of a network, with its inputs [n, in] and outputs
    [n, K] of batches; None if there is none, or it answers for every token.
    """
    seen: dict[str, Tensor] = {}
    given, said, found = [], [], ""
    named = {name: within(network).get_submodule(name) for name in layers}
    for x in batches:
        with watched(named, lambda name, _, got, __: seen.update({name: got[0]})):
            outputs: Tensor = network(x)
        found = next((n for n in layers if _gives(network, n, seen.get(n), outputs)), "")
        if not found:
            return None
        given.append(seen[found])
        said.append(outputs)
    return found, torch.cat(given), torch.cat(said)


def _gives(network: nn.Module, name: str, x: Tensor | None, outputs: Tensor) -> bool:
    """Whether a layer gives the outputs at its inputs."""
    if x is None or x.ndim != 2:
        return False
    own: Tensor = within(network).get_submodule(name)(x)
    return own.shape == outputs.shape and torch.equal(own, outputs)


def portions(x: Tensor) -> list[Tensor]:
    """Inputs a few at a time."""
    return list(torch.split(x, PORTION))
