"""A network that says what clients' networks say together, layer by layer, by least squares.

Units of every group are chosen among all clients' (`fedbayes.fusion.choice`), and maybe others
merged into them (`fedbayes.fusion.merging`). Then, from the inputs up, each layer is solved for
(`fedbayes.fusion.solver`).

Clients whose operations are the same, in whatever widths, are donors (`fedbayes.fusion.donors`); of
others only the teacher's outputs count. Units are chosen within cells, and every entry of every
tensor has an origin, a donor and an entry there (`Origins`). What the trace cannot follow comes
whole from one donor, and what reads it is solved for as usual. Images lie channels last, unless the
network's code asks how they lie.
"""

from collections.abc import Callable, Sequence
from itertools import chain, cycle
from typing import Literal

import torch
from torch import Tensor, nn

from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion.assembly import Origins, assembled, whole_tensors
from fedbayes.fusion.choice import UnitChoice, choose
from fedbayes.fusion.donors import TracedNetwork, find_donors
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.layers import fits
from fedbayes.fusion.shares import Shares
from fedbayes.fusion.solver import Solver
from fedbayes.fusion.targets import Targets
from fedbayes.fusion.teacher import Teacher, divergence
from fedbayes.fusion.widths import Orders, Widths, orders, recorded
from fedbayes.likelihoods import Classes
from fedbayes.models.resize import taken, with_weights

UnitsFrom = Literal["auto", "chosen", "merged"]
UNSEEN = 4
"""Batches on which it is seen what is nearer to the teacher."""
MEMORY = 512 * 2**20
"""Bytes of targets, and of activations, that are kept from layer to layer."""


WHOLE = "taken whole from one client"
"""How the note about layers that the trace cannot follow begins."""


def regress(
    clients: Sequence[nn.Module],
    like: nn.Module,
    teacher: Teacher,
    draw: Callable[[int], Tensor],
    batches: int,
    *,
    widths: Widths = 1.0,
    samples: Sequence[float] | None = None,
    units: UnitsFrom = "auto",
    ridge: float = 1e-3,
    memory: int = MEMORY,
    watch: Callable[[str], None] | None = None,
    progress: Callable[[str], object] | None = None,
) -> nn.Module:
    """Fuse networks by least squares in function space.

    Memory: one batch's activations of one network at a time; 32 (F + 1)² bytes for a layer of F
    features (normal equations and their factor); 4 KB for every unit of all clients, or 8 bytes
    times the units that are wanted; and twice `memory`. Nothing else grows with the number of
    batches. Where `memory` is enough, donors go through each batch once for all layers, and the
    fused network once; else again for the layers that it is not enough for.

    Args:
        clients: their networks. Those with the graph of `like`, in whatever widths, give units;
            of others only the teacher's outputs count.
        like: the network whose graph the fused one has.
        teacher: the ensemble prediction of the clients, in their order.
        draw: the i-th batch of inputs [n, *shape]; it is asked several times for each, and all
            batches have one size.
        batches: how many there are.
        widths: of the groups of units; never more than all donors' units.
        samples: of each client; what no unit can be followed through is taken whole from the
            client with the most. By default they follow the teacher's shares.
        units: where they come from: each from one client (`chosen`), neurons also merged from
            several (`merged`), or whichever is nearer to the teacher on batches after the last
            (`auto`), which solves for both, and has the clients say it once.
        ridge: of the mean diagonal of the normal equations, toward the chosen units' own weights.
        memory: bytes of targets that are kept, and as many of the fused network's activations.
        watch: called with what a user should know of what could not be done as asked.
        progress: called with the layer that is being solved for.

    Raises:
        ModelError: `like` cannot be traced, its code does not bear the widths, batches differ in
            size, or outputs are not of one kind.
        ConfigError: widths name no group, or are none; or there are no batches.
    """
    say = watch or (lambda text: None)
    if batches < 1:
        raise ConfigError(f"got {batches} batches of inputs; at least one is needed")
    if not clients:
        raise ModelError("there are no models to fuse")
    example = draw(0)
    own, donors = find_donors(clients, like, example, say)
    taught = _taught(own, teacher, example)
    shares = _shares(teacher, donors, len(clients), taught.shape[-1])
    anchor = _anchor(shares, donors, samples)
    untouched = own.steps.units().untouched
    if untouched and own is not donors[0]:
        say(f"{WHOLE}: {whole_tensors(untouched)}")
    wanted = orders(own, donors, widths, example, say)
    _check_sizes(own, donors, wanted)
    chosen, whole = choose(donors, wanted, draw, batches, shares, anchor, units != "chosen")
    if whole:
        say(f"units of only one client: {', '.join(whole)}")

    merged = [one.group.layer for one in chosen if one.members is not None]
    choices = [chosen]
    if merged and units == "auto":
        choices.append([one.without for one in chosen])
    origins = [Origins(own, donors, choice) for choice in choices]
    started = [assembled(own, donors, each, shares, anchor) for each in origins]
    placed = [(one.group, one.order) for one in chosen]
    steps = recorded(own, with_weights(like, started[0]), placed, example)
    layers = []
    for origin, tensors in zip(origins, started, strict=True):
        found, left = fits(steps, origin, tensors, own, donors[0].client >= 0)
        layers.append(found)
    if left:
        say(f"not fitted, with their clients' own weights: {', '.join(left)}")
    together = [*chain.from_iterable(zip(*layers, strict=True))]
    targets = Targets(
        together, steps, donors, anchor, shares, teacher, taught, draw, batches, memory
    )
    solvers = [
        Solver(steps, tensors, origin, anchor, targets, draw, batches, memory // len(choices))
        for origin, tensors in zip(origins, started, strict=True)
    ]
    with torch.no_grad():
        for fit, solver in zip(together, cycle(solvers), strict=False):
            if progress is not None and solver is solvers[0]:
                progress(f"solving {fit.name}")
            solver.solve(fit, ridge)
    networks = [with_weights(like, solver.tensors) for solver in solvers]
    nearest = networks[0]
    if len(networks) > 1:
        unseen = [draw(batches + number) for number in range(UNSEEN)]
        far = _far(networks, teacher, unseen)
        nearest = networks[far[1] <= far[0]]
    if merged and nearest is networks[0]:
        say(f"neurons of several clients are merged in layer {', '.join(merged)}")
    return nearest


def _check_sizes(own: TracedNetwork, donors: Sequence[TracedNetwork], wanted: Orders) -> None:
    """See that no layer is too large before units are chosen, which can take minutes.

    Raises:
        ModelError: as `fits`.
    """
    first = []
    for group, order in wanted:
        none = torch.zeros(len(order), dtype=torch.int64)
        first.append(UnitChoice(group, order, none, none))
    tensors = own.tensors | taken(own.tensors, wanted)
    fits(own.steps, Origins(own, donors, first), tensors, own, donors[0].client >= 0)


def _anchor(
    shares: Shares, donors: Sequence[TracedNetwork], samples: Sequence[float] | None
) -> int:
    """Place of the donor that what no unit can be followed through is taken from."""
    weights = [
        shares.table[i].sum().item() if samples is None else samples[donor.client]
        for i, donor in enumerate(donors)
    ]
    return max(range(len(donors)), key=weights.__getitem__)


@torch.no_grad()
def _taught(own: TracedNetwork, teacher: Teacher, example: Tensor) -> Tensor:
    """What the teacher says of a batch, of which the network gives as many outputs."""
    wide, taught = own.steps.outputs(own.tensors, example), teacher(example)
    if wide.shape != taught.shape:
        raise ModelError(
            f"the fused network returns outputs of shape {tuple(wide.shape)}, but the ensemble "
            f"{tuple(taught.shape)}"
        )
    return taught


@torch.no_grad()
def _far(networks: Sequence[nn.Module], teacher: Teacher, unseen: Sequence[Tensor]) -> list[float]:
    """KL(teacher ‖ network) of each on batches that nothing was solved on, nats."""
    taught = torch.cat([teacher(x) for x in unseen])
    likelihood = teacher.likelihood(taught.shape[-1])
    functions = [frozen(network) for network in networks]
    outputs = [torch.cat([function(x) for x in unseen]) for function in functions]
    return [float(divergence(each, taught, likelihood)) for each in outputs]


def _shares(
    teacher: Teacher, donors: Sequence[TracedNetwork], clients: int, outputs: int
) -> Shares:
    """Of donors in outputs."""
    of_classes = isinstance(teacher.likelihood(outputs), Classes)
    return Shares(_table(teacher, donors, clients, outputs), of_classes)


def _table(teacher: Teacher, donors: Sequence[TracedNetwork], clients: int, classes: int) -> Tensor:
    """As in `Shares`."""
    if donors[0].client < 0:
        return torch.ones(1, classes)
    if teacher.shares is None:
        return torch.full((len(donors), classes), 1 / len(donors))
    shares = teacher.shares.float()
    if shares.ndim == 1:
        shares = shares[:, None].expand(-1, classes)
    elif classes == 1:  # one logit of two classes, in which the teacher has their mean
        shares = shares.mean(1, keepdim=True)
    if shares.shape != (clients, classes):
        raise ModelError(
            f"the teacher's shares have {tuple(shares.shape)} clients and classes; there are "
            f"{clients} and {classes}"
        )
    shares = shares[[donor.client for donor in donors]]
    total = shares.sum(0)
    return torch.where(total > 0, shares / total.clamp(min=1e-12), 1 / len(donors))
