"""Targets of the layers of a fused network, recorded from the donors.

A layer's targets are the outputs of its units in their own clients' networks; these do not depend
on the fused network. So one forward pass of each donor and batch records the targets of all layers,
also for other choices of units, as long as the recorded outputs take little memory. The same pass
gives the ensemble prediction of the clients at its end.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from fedbayes.data.progress import progress
from fedbayes.fusion.assembly import FREE
from fedbayes.fusion.donors import TracedNetwork
from fedbayes.fusion.layers import Fit, bundles
from fedbayes.fusion.patches import picked
from fedbayes.fusion.shares import Shares
from fedbayes.fusion.teacher import Teacher
from fedbayes.models.steps import Steps


class Targets:
    """Targets of all layers, read in the order of the layers.

    Args:
        fits: the layers, of one choice of units or several.
        steps: of the fused network, whatever its units.
        donors: the networks that the units are from.
        anchor: the donor of what comes from no client in particular.
        shares: of donors in outputs.
        teacher: the ensemble prediction of the clients.
        taught: that of the first batch, [n, K].
        draw: batches of inputs by number.
        batches: how many there are.
        memory: bytes of targets to keep. Larger targets are recorded by layer and batch.
    """

    def __init__(
        self,
        fits: Sequence[Fit],
        steps: Steps,
        donors: Sequence[TracedNetwork],
        anchor: int,
        shares: Shares,
        teacher: Teacher,
        taught: Tensor,
        draw: Callable[[int], Tensor],
        batches: int,
        memory: int,
    ) -> None:
        self.steps, self.donors, self.anchor, self.shares = steps, donors, anchor, shares
        self.teacher, self.draw, self.batches = teacher, draw, batches
        self._taught = taught
        self._bundles = bundles(fits, batches, memory)
        self._heard: dict[tuple[Fit, int], Tensor] = {}
        self._clients_tell = len(donors) == len(teacher.clients)

    def of(self, fit: Fit, number: int) -> Tensor:
        """What a layer is to say at its places of a batch, [n, rows]."""
        if (fit, number) not in self._heard:
            self._heard.clear()
            bundle = next(bundle for bundle in self._bundles if fit in bundle)
            if len(bundle) == 1:
                self._listen(bundle, [number])
            else:
                most = max(one.batches(self.batches) for one in bundle)
                with progress("recording activations", most * len(self.donors)) as advance:
                    self._listen(bundle, range(self.batches), advance)
        return self._heard[fit, number]

    def _listen(
        self,
        bundle: Sequence[Fit],
        numbers: Iterable[int],
        advance: Callable[[int], object] = int,
    ) -> None:
        """Hear what these layers are to say on batches, as far as they want them."""
        last = [fit for fit in bundle if self._is_last(fit)]
        inner = [fit for fit in bundle if not self._is_last(fit)]
        for number in numbers:
            asking = [fit for fit in inner if number < fit.batches(self.batches)]
            ending = [fit for fit in last if number < fit.batches(self.batches)]
            if not asking and not ending:
                break
            x = self.draw(number)
            outputs = self._inner(asking, number, x, bool(ending) and self._clients_tell, advance)
            for fit in ending:
                taught = self._teachers(number, x, outputs)
                self._heard[fit, number] = picked(taught, fit.channel, fit.places(number))

    def _inner(
        self,
        asking: Sequence[Fit],
        number: int,
        x: Tensor,
        ending: bool,
        advance: Callable[[int], object],
    ) -> list[Tensor]:
        """Hear the donors on a batch; their outputs, if they are wanted."""
        places = {fit: fit.places(number) for fit in asking}
        for fit in asking:
            shape = () if fit.outputs else (places[fit].shape[1], len(fit.origin.donor))
            self._heard[fit, number] = torch.zeros(shape)
        outputs = []
        for at, donor in enumerate(self.donors):
            # Operations of donors have the fused network's order.
            own = [fit for fit in asking if fit.outputs or bool((self._givers(fit) == at).any())]
            wanted: dict[Node, list[Fit]] = {}
            for fit in own:
                node = donor.steps.nodes[self.steps.place[fit.said]]
                wanted.setdefault(node, []).append(fit)
            missing = len(wanted) + ending
            if not missing:
                continue
            for step in donor.steps.run(donor.tensors, x):
                for fit in wanted.get(step.node, ()):
                    said = picked(step.value, fit.channel, places[fit])
                    self._enter(fit, number, at, said)
                missing -= step.node in wanted
                if ending and step.node is donor.steps.output:
                    outputs.append(step.value)
                    missing -= 1
                if not missing:
                    break
            advance(1)
        return outputs

    def _enter(self, fit: Fit, number: int, at: int, said: Tensor) -> None:
        """Add what a donor says for a layer: of its own units, or by its shares."""
        heard = self._heard[fit, number]
        if not fit.outputs:
            parts = fit.origin.parts
            own = (self._givers(fit) == at).nonzero()[:, 0]
            heard.index_add_(1, parts.place[own], said[:, parts.entry[own]] * parts.share[own])
            return
        whole = self.shares.classes and said.shape[-1] == self.shares.table.shape[1]
        said = self.shares.part(at, said) if whole else self.shares.mean(at) * said
        self._heard[fit, number] = heard + said

    def _givers(self, fit: Fit) -> Tensor:
        """The donors of a layer's rows, by part."""
        donor = fit.origin.parts.donor
        return torch.where(donor == FREE, self.anchor, donor)

    def _teachers(self, number: int, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """What the clients say together on a batch, from their outputs where these suffice."""
        if number == 0:
            taught = self._taught
            self._clients_tell = self._clients_tell and torch.allclose(
                self.teacher.of(outputs), taught, rtol=1e-4, atol=1e-4
            )
            return taught
        return self.teacher.of(outputs) if self._clients_tell else self.teacher(x)

    def _is_last(self, fit: Fit) -> bool:
        """Whether a layer's outputs are the network's."""
        return fit.outputs and self.steps.handed_on(self.steps.output) is fit.said
