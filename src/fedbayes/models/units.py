"""Groups of units: which entries of which tensors belong to a unit, and what can be done to it.

Methods that leave units out (sparse, dropped, cut away) use these groups. A unit is a unit of a
linear layer or a filter of a convolution. It owns its row of the weights, its bias, its scale and
shift in a normalization that follows, and all that adds into the same place. So a residual stream
is one group, and so are the heads of attention. The columns that read a unit are known too,
wherever they are. A depthwise filter belongs to its channel; a convolution in groups has units of
one channel of each group, which keeps the groups of one size.

All of it comes from a trace of the network (`fedbayes.models.trace`); no declaration is needed.
Layers that the trace cannot follow are listed with the reason and never changed.

`masks` says what is left of every tensor, `mask` makes it a message, `slice` the smaller network's
weights, `zero` the whole with zeros, and `permute` the same function in another order; each is a
loop over axes. Gates, dropout, the group lasso and the export are a few lines each above this.
`Network.narrowing` are the groups that the module's own code lets shrink; each is tried.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedbayes.core.messages import Masked, Message
from fedbayes.core.tensors import Tensors
from fedbayes.errors import FedbayesError, ModelError
from fedbayes.models.operations import follow, tensor_names
from fedbayes.models.trace import Trace

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class Axis:
    """An axis of a tensor whose entries belong to units."""

    tensor: str
    """Name of the tensor."""
    axis: int
    units: tuple[int, ...]
    """The unit of every entry; -1 for entries of other groups."""

    @property
    def axes(self) -> tuple[int]:
        """The axis, as masks have it."""
        return (self.axis,)

    @cached_property
    def index(self) -> Tensor:
        """The same as a tensor, int64 [entries]."""
        return torch.tensor(self.units, dtype=torch.int64)

    @cached_property
    def plain(self) -> bool:
        """Whether entry j is unit j, up to the last entry."""
        return self.units == tuple(range(len(self.units)))

    def entries(self, values: Tensor, otherwise: float | bool = 1) -> Tensor:
        """Values of the units [count] for every entry of the axis [entries].

        Args:
            values: of the units.
            otherwise: what entries of other groups get.
        """
        if self.plain and len(values) == len(self.units):
            return values
        rest = values.new_full((1,), otherwise)
        return torch.cat([values, rest])[self.index.to(values.device)]

    def along(self, values: Tensor, like: Tensor, otherwise: float = 1) -> Tensor:
        """`entries`, shaped to multiply a tensor."""
        shape = [-1 if index == self.axis else 1 for index in range(like.ndim)]
        return self.entries(values, otherwise).reshape(shape)

    def rows(self, tensor: Tensor, count: int) -> Tensor:
        """All entries of the tensor by unit, [count, most that a unit has]; zeros elsewhere."""
        rows = tensor.movedim(self.axis, 0).flatten(1) if tensor.ndim > 1 else tensor[:, None]
        if self.plain and count == len(self.units):
            return rows
        places, most = self._places
        own = [entry for entry, unit in enumerate(self.units) if unit >= 0]
        if len(own) < len(self.units):
            rows = rows[torch.tensor(own, device=rows.device)]
        whole = rows.new_zeros(count * most, rows.shape[1])
        return whole.index_copy(0, places.to(rows.device), rows).reshape(count, -1)

    @cached_property
    def _places(self) -> tuple[Tensor, int]:
        """Where entries go in rows by unit, and how many a unit has at most."""
        seen: dict[int, int] = {}
        ranks = []
        for unit in self.units:
            ranks.append(seen.get(unit, 0))
            seen[unit] = ranks[-1] + 1
        most = max(number for unit, number in seen.items() if unit >= 0)
        own = [u * most + r for u, r in zip(self.units, ranks, strict=True) if u >= 0]
        return torch.tensor(own, dtype=torch.int64), most


@dataclass(frozen=True)
class Group:
    """Units that are made in the same place: of one layer, of a residual stream, heads.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.models.units import Group
        >>> from fedbayes.models.units import find_units
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> group = find_units(network, torch.zeros(1, 3)).groups[0]
        >>> group.layer, group.kind, group.count
        ('0', 'dense', 4)
    """

    layer: str
    """Name of the first layer that makes them; no other group has it."""
    kind: Literal["conv", "dense"]
    count: int
    """Number of units."""
    producers: tuple[str, ...]
    """Names of the weights whose rows make them, inputs to outputs."""
    owned: tuple[Axis, ...]
    """Axes of parameters that make the units or normalize them; the first producer's first."""
    readers: tuple[Axis, ...]
    """Axes of the weights that read them."""
    running: tuple[Axis, ...]
    """Axes of buffers that are by unit: running statistics."""
    cells: tuple[int, ...]
    """Of every unit; units can be exchanged with those of the same cell only."""
    output: bool
    """Whether these are outputs of the network."""
    zero_safe: bool
    """Whether readers see zeros in the place of a unit of which all that it owns is zero."""
    mixed: str
    """Why their number counts (layer normalization, say), so that none can be sliced out; empty
    if it does not."""
    norms: tuple[str, ...] = ()
    """Modules of group normalization that count them."""
    frozen_readers: bool = False
    """Whether weights that are not trained read them as well."""

    @property
    def weight(self) -> str:
        """Name of the first producer."""
        return self.producers[0]

    @cached_property
    def made(self) -> tuple[Axis, ...]:
        """The axes of the producers."""
        return tuple(axis for axis in self.owned if axis.tensor in self.producers)

    @property
    def sliceable(self) -> bool:
        """Whether the network without a unit is the network with zeros in its place.

        Group normalization counts its channels, however.
        """
        safe = self.zero_safe and not self.mixed and not self.output
        return safe and bool(self.readers) and not self.frozen_readers

    @property
    def whole_because(self) -> str:
        """Why no unit can be sliced out of the group; empty if the trace knows no reason."""
        if self.mixed:
            return self.mixed
        if not self.zero_safe:
            return "layers that read its units do not see zeros for a removed unit"
        return "frozen weights read its units" if self.frozen_readers else ""

    def thinned(self, gone: int, noise: Tensor | None = None) -> Tensor:
        """Units that stay when so many of every `step` go, from every cell, bool [count].

        Args:
            gone: how many of `step` units go.
            noise: numbers [count] whose order says which; else they are the last.
        """
        noise = -torch.arange(float(self.count)) if noise is None else noise
        keep = torch.ones(self.count, dtype=torch.bool)
        cells = torch.tensor(self.cells)
        for cell in set(self.cells):
            own = (cells == cell).nonzero()[:, 0]
            keep[own] = noise[own].argsort() >= gone * (len(own) // self.step)
        return keep

    @cached_property
    def step(self) -> int:
        """Units can be left out by the same share of every cell: this many to choose from.

        The largest number that divides the sizes of all cells.
        """
        return gcd(*(self.cells.count(cell) for cell in set(self.cells)))


@dataclass(frozen=True)
class Entries:
    """The entries of a weight, each on its own: a group of which every entry is a unit.

    It is its own only axis. Nothing else belongs to an entry, and nothing is known to read it.
    """

    tensor: str
    """Name of the weight."""
    shape: tuple[int, ...]
    output: bool
    """Whether it makes outputs of the network."""
    readers: tuple[Axis, ...] = ()
    running: tuple[Axis, ...] = ()
    zero_safe: bool = False

    @property
    def layer(self) -> str:
        """Name of the layer; no other tensor has it."""
        return self.tensor.removesuffix(".weight")

    @property
    def count(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def axes(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(len(self.shape)))

    @property
    def owned(self) -> tuple["Entries", ...]:
        """The weight itself."""
        return (self,)

    @property
    def made(self) -> tuple["Entries", ...]:
        """The weight itself."""
        return (self,)

    @property
    def weight(self) -> str:
        """Name of the weight."""
        return self.tensor

    def entries(self, values: Tensor, otherwise: float | bool = 1) -> Tensor:
        """Values [count] in the shape of the weight; `otherwise` is for groups of other kinds."""
        return values.reshape(self.shape)

    def along(self, values: Tensor, like: Tensor, otherwise: float = 1) -> Tensor:
        """`entries`."""
        return self.entries(values)

    def rows(self, tensor: Tensor, count: int) -> Tensor:
        """The weight by entry, [count, 1]."""
        return tensor.reshape(count, 1)


Gateable = Group | Entries
"""What can be left out part by part: units, or single weights."""


@dataclass(frozen=True)
class Groups:
    """What a trace found.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.models.units import Groups, find_units
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> found = find_units(network, torch.zeros(1, 3))
        >>> isinstance(found, Groups), dict(found.untouched)
        (True, {})
    """

    groups: tuple[Group, ...]
    """All groups, in the order from inputs to outputs."""
    untouched: Mapping[str, str]
    """Weights whose rows belong to no group, with the reason."""
    across: frozenset[str] = frozenset()
    """Weights of layers that go along another axis than that of their inputs' units: places of
    what they make are units of others, as where tokens are mixed channel by channel."""


def find_units(module: nn.Module, example: Tensor) -> Groups:
    """The groups of units of a network.

    Args:
        module: the network; it is left in evaluation mode.
        example: a batch of at least two samples; only its shape and type count.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.models.units import find_units
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> [group.count for group in find_units(network, torch.zeros(1, 3)).groups]
        [4, 2]
    """
    try:
        return program_units(exported(module, example))
    except Exception as error:  # whatever a module of somebody's own may raise
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        weights = (n for n, p in module.named_parameters() if p.ndim > 1)
        return Groups((), dict.fromkeys(weights, f"it cannot be traced: {line}"))


def exported(module: nn.Module, example: Tensor) -> "ExportedProgram":
    """The operations of one forward pass, with attention written out.

    Args:
        module: the network; it is left in evaluation mode.
        example: a batch of at least two samples; only its shape and type count.

    Raises:
        Exception: whatever a module of somebody's own may raise.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it hides attention in one operation
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attributes that an export needs no buffer for
            return torch.export.export(evaluating(module), (example,), strict=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def evaluating(module: nn.Module) -> nn.Module:
    """The module in evaluation mode; programs of `torch.export` know no other."""
    try:
        return module.eval()
    except NotImplementedError:
        return module


WRITES_OVER = (
    "changes its inputs in place (such as x.sub_(…) or x += …), but samples are used more than "
    "once. Compute new tensors, such as x = x - …"
)
"""What to say of such a network, behind its name."""


def require_functions(networks: Mapping[str, nn.Module], x: Tensor) -> None:
    """See that networks take inputs [n, ...], do not change them, and answer each as before.

    Raises:
        ModelError: one does not.
    """
    for name, network in networks.items():
        own = x.clone()
        with torch.no_grad():
            try:
                answer = evaluating(network)(own)
            except FedbayesError:
                raise
            except Exception as error:  # the network's own, of any class
                line = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ModelError(
                    f"{name} fails on inputs of shape ({', '.join(map(str, ('n', *x.shape[1:])))}) "
                    f"and type {str(x.dtype).removeprefix('torch.')}: {line}. If it takes others, "
                    "such as token ids, give real samples as inputs"
                ) from None
            if own._version:
                raise ModelError(f"{name} {WRITES_OVER}")
            again = network(x)
        if isinstance(answer, Tensor) and not torch.allclose(answer, again, 1e-3, 1e-3, True):
            raise ModelError(
                f"{name} answers an input differently each time. Draw random numbers only in "
                "training, such as by nn.Dropout, or F.dropout(x, 0.5, self.training)"
            )


def require_gradients(networks: Mapping[str, nn.Module], x: Tensor) -> None:
    """See that networks have gradients in evaluation mode, or raise a ModelError."""
    for name, network in networks.items():
        leaf = x.clone().requires_grad_(x.is_floating_point())
        with torch.enable_grad():
            answer = evaluating(network)(leaf)
            if not isinstance(answer, Tensor):
                raise ModelError(
                    f"{name} returns a {type(answer).__name__}. Let forward return only its "
                    "outputs, a tensor"
                )
            if not answer.requires_grad:
                continue
            wanted = [t for t in (leaf, *network.parameters()) if t.requires_grad]
            try:
                torch.autograd.grad(answer.sum(), wanted, allow_unused=True)
            except RuntimeError as error:
                line = str(error).partition(":")[0].partition("\n")[0]
                raise ModelError(
                    f"{name} has no gradients in evaluation mode ({line}). Compute new tensors "
                    "instead of changing them in place, such as x = x + … for x += … after "
                    "dropout"
                ) from None


def require_apart(network: nn.Module, x: Tensor, why: str) -> None:
    """See that a network answers a sample by itself, and not by those next to it.

    Args:
        network: left in evaluation mode.
        x: inputs [n, ...], two or more.
        why: what samples are taken one by one for.

    Raises:
        ModelError: it does not, as normalizations without running statistics.
    """
    with torch.no_grad():
        together = evaluating(network)(x)[:2]
        try:
            alone = torch.cat([network(x[:1]), network(x[1:2])])
        except ValueError:  # a normalization that takes no single sample
            alone = None
    if alone is None or not torch.allclose(together, alone, 1e-3, 1e-3, equal_nan=True):
        raise ModelError(
            f"the outputs of a {type(network).__name__} for a sample depend on its batch, and "
            f"{why}. Use normalizations with running statistics (track_running_stats), or leave "
            "it out"
        )


def program_units(program: "ExportedProgram") -> Groups:
    """The groups of units of a network that was exported."""
    names = set(tensor_names(program).values())
    weights = {n: p for n, p in program.named_parameters() if p.ndim > 1 and n in names}
    buffers = dict(program.named_buffers()).keys()
    return _Collected(follow(program), weights, buffers).result()


class _Collected:
    """Groups from a trace."""

    def __init__(self, trace: Trace, weights: Mapping[str, Tensor], buffers: Set[str]) -> None:
        self.trace, self.weights, self.buffers = trace, weights, buffers
        self.axes = {key: trace.roots(atoms).tolist() for key, atoms in trace.axes.items()}
        self.reasons: dict[int, str] = {}
        for atoms, reason in trace.untouchable:
            for atom in self._atoms(atoms):
                self.reasons[atom] = self.reasons.get(atom) or reason
        self.constant = {atom for atoms in trace.constant for atom in self._atoms(atoms)}
        self.outputs = {atom for atoms in trace.outputs for atom in self._atoms(atoms)}
        self.mixed = {atom: why for atoms, why in trace.mixed for atom in self._atoms(atoms)}
        self.norms: dict[int, list[str]] = {}
        for atoms, name in trace.group_norms:
            for atom in set(self._atoms(atoms)):
                self.norms.setdefault(atom, []).append(name)
        self.marks: dict[int, set[tuple[int, ...]]] = {}
        places = self._places()
        for number, (atoms, marks) in enumerate(trace.cells):
            for root, atom, mark in zip(
                trace.roots(atoms).ravel().tolist(),
                atoms.ravel().tolist(),
                np.broadcast_to(marks, atoms.shape).ravel().tolist(),
                strict=True,
            ):
                self.marks.setdefault(root, set()).add((number, places.get(atom, -1), mark))
        for number, (one, two) in enumerate(trace.joined, len(trace.cells)):
            for root, *pair in zip(
                trace.roots(one).tolist(), one.tolist(), two.tolist(), strict=True
            ):
                at = (places.get(atom, -1) for atom in pair)
                self.marks.setdefault(root, set()).add((number, *at))

    def _places(self) -> dict[int, int]:
        """A number for every atom's axis and place in its unit, the same for every unit."""
        numbers: dict[tuple[tuple[str, int], int], int] = {}
        places = {}
        for key, atoms in self.trace.axes.items():
            seen: dict[int, int] = {}
            for atom, root in zip(atoms.tolist(), self.axes[key], strict=True):
                rank = seen[root] = seen.get(root, -1) + 1
                places[atom] = numbers.setdefault((key, rank), len(numbers))
        return places

    def _atoms(self, atoms: np.ndarray) -> list[int]:
        return [atom for atom in self.trace.roots(atoms).ravel().tolist() if atom >= 0]

    def result(self) -> Groups:
        """Weights that make the same units form a group, in the order of the forward pass."""
        order, readers = self.trace.order, self.trace.readers
        makers = sorted(
            (order[name], axis, name)
            for name, axis in self.axes
            if name in self.weights and name in order and (name, axis) not in readers
        )
        groups: list[tuple[list[int], list[str]]] = []
        for _, axis, name in makers:
            atoms = list(dict.fromkeys(self.axes[name, axis]))
            if all(self.reasons.get(atom) == "" for atom in atoms):
                continue  # taps of a filter, say
            joined = [group for group in groups if not set(group[0]).isdisjoint(atoms)]
            groups = [group for group in groups if group not in joined]
            together = [atom for group in joined for atom in group[0]] + atoms
            producers = [producer for group in joined for producer in group[1]]
            groups.append((list(dict.fromkeys(together)), [*producers, name]))
        groups.sort(key=lambda group: order[group[1][0]])
        found, grouped = [], set[int]()
        untouched = dict.fromkeys(self.weights, "its units are not used")
        for atoms, names in groups:
            reason = next((self.reasons[atom] for atom in atoms if atom in self.reasons), None)
            if reason is None:
                found.append(self._group(atoms, tuple(dict.fromkeys(names))))
                grouped.update(atoms)
                for name in names:
                    untouched.pop(name, None)
            else:
                untouched |= {name: reason for name in names if name in untouched}
        across = frozenset(
            name
            for name, others in self.trace.across.items()
            if any(not grouped.isdisjoint(self._atoms(atoms)) for atoms in others)
        )
        return Groups(_named(found), untouched, across)

    def _group(self, atoms: list[int], producers: tuple[str, ...]) -> Group:
        """These atoms as the units of a group, with all axes on which they are."""
        numbers = {atom: unit for unit, atom in enumerate(atoms)}
        axes = []
        for (name, axis), roots in self.axes.items():
            units = tuple(numbers.get(root, -1) for root in roots)
            if any(unit >= 0 for unit in units):
                axes.append(Axis(name, axis, units))
        order = self.trace.order
        axes.sort(key=lambda axis: (order.get(axis.tensor, len(order)), axis.axis))
        trained = [axis for axis in axes if axis.tensor not in self.buffers]
        reading = [(axis.tensor, axis.axis) in self.trace.readers for axis in trained]
        counts = [
            np.bincount([unit for unit in axis.units if unit >= 0], minlength=len(atoms)).tolist()
            for axis in axes
        ]
        cells: dict[object, int] = {}
        cell = [
            cells.setdefault((counted, frozenset(self.marks.get(atom, ()))), len(cells))
            for atom, counted in zip(atoms, zip(*counts, strict=True), strict=True)
        ]
        return Group(
            layer=producers[0].removesuffix(".weight"),
            kind="conv" if self.weights[producers[0]].ndim > 2 else "dense",
            count=len(atoms),
            producers=producers,
            owned=tuple(axis for axis, reads in zip(trained, reading, strict=True) if not reads),
            readers=tuple(axis for axis, reads in zip(trained, reading, strict=True) if reads),
            running=tuple(axis for axis in axes if axis.tensor in self.buffers),
            cells=tuple(cell),
            output=not self.outputs.isdisjoint(atoms),
            zero_safe=self.constant.isdisjoint(atoms),
            mixed=next((self.mixed[atom] for atom in atoms if atom in self.mixed), ""),
            norms=tuple(dict.fromkeys(n for atom in atoms for n in self.norms.get(atom, ()))),
        )


def _named(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups, each with a name of its own: one tensor may make units on two of its axes."""
    seen: dict[str, int] = {}
    named = []
    for group in groups:
        seen[group.layer] = number = seen.get(group.layer, 0) + 1
        named.append(replace(group, layer=f"{group.layer}:{number}") if number > 1 else group)
    return tuple(named)


def trained_groups(found: Groups, trained: Set[str]) -> Groups:
    """Of these groups those that own trained tensors alone; readers that are not are none."""
    groups = []
    untouched = {name: why for name, why in found.untouched.items() if name in trained}
    for group in found.groups:
        if not trained >= {axis.tensor for axis in group.owned}:
            frozen = "it adds to values that are not trained"
            untouched |= {name: frozen for name in group.producers if name in trained}
            continue
        readers = tuple(axis for axis in group.readers if axis.tensor in trained)
        frozen_readers = len(readers) < len(group.readers)
        groups.append(replace(group, readers=readers, frozen_readers=frozen_readers))
    return Groups(tuple(groups), untouched)


Alive = Mapping[str, Tensor]
"""Which units remain: group by its layer to a boolean tensor [count]; others are whole. Or the
probability of each, float64 [count]."""

Masks = dict[str, dict[tuple[int, ...], Tensor]]
"""By tensor, the masks of its axes, as `Masked` takes them."""


def masks(
    groups: Iterable[Gateable], alive: Alive, *, readers: bool = True, running: bool = False
) -> Masks:
    """What remains of each tensor when only these units do.

    Args:
        groups: of the network.
        alive: units that remain.
        readers: whether the columns that read a missing unit go as well, where they would read
            zeros.
        running: whether its running statistics go as well.
    """
    found: Masks = {}
    for group in groups:
        keep = alive.get(group.layer)
        if keep is None:
            continue
        touched: list[Axis | Entries] = [*group.owned, *(group.running if running else ())]
        if readers and group.zero_safe:
            touched += group.readers
        for axis in touched:
            of_tensor = found.setdefault(axis.tensor, {})
            kept = axis.entries(keep, True)
            before = of_tensor.get(axis.axes)
            of_tensor[axis.axes] = kept if before is None else before * kept
    return found


def mask(weights: Tensors, found: Masks) -> Message:
    """The weights as a message from which everything that is masked is left out."""
    return {
        name: Masked.keep(tensor, found[name]) if name in found else tensor
        for name, tensor in weights.items()
    }


def slice(message: Message) -> Tensors:
    """The weights of the smaller network that a message of whole units stands for.

    Every masked tensor shrinks to the slices that its masks keep.
    """
    return {
        name: item.compact() if isinstance(item, Masked) else item for name, item in message.items()
    }


def zero(weights: Tensors, found: Masks) -> Tensors:
    """The weights with zeros where they are masked."""
    result = dict(weights)
    for name, axes in found.items():
        tensor = result[name]
        for covered, kept in axes.items():
            shape = [size if axis in covered else 1 for axis, size in enumerate(tensor.shape)]
            tensor = tensor * kept.to(tensor.dtype).reshape(shape)
        result[name] = tensor
    return result


def permute(weights: Tensors, group: Group, order: Sequence[int]) -> Tensors:
    """The weights of the same function with a group's units in another order.

    Args:
        weights: of the network.
        group: whose units change places.
        order: unit j becomes what unit `order[j]` was, of the same cell.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.models.units import find_units, permute
        >>> network = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> group = find_units(network, torch.zeros(1, 3)).groups[0]
        >>> turned = permute(network.state_dict(), group, [1, 0])
        >>> bool((turned["0.bias"] == network[0].bias.flip(0)).all())
        True
    """
    result = dict(weights)
    for axis in group.owned + group.running + group.readers:
        entries: dict[int, list[int]] = {}
        for entry, unit in enumerate(axis.units):
            entries.setdefault(unit, []).append(entry)
        index = list(range(len(axis.units)))
        for unit, places in entries.items():
            if unit >= 0:
                for place, came in zip(places, entries[order[unit]], strict=True):
                    index[place] = came
        tensor = result[axis.tensor]
        result[axis.tensor] = tensor.index_select(
            axis.axis, torch.tensor(index, device=tensor.device)
        )
    return result


def row_norms(weights: Tensors, group: Gateable) -> Tensor:
    """‖w_g‖₂ of each unit's weights in the layers that make it, [count]."""
    made = [axis.rows(weights[axis.tensor], group.count) for axis in group.made]
    rows = made[0] if len(made) == 1 else torch.cat(made, dim=1)
    found: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return found
