"""A fused network's layers, solved for one by one from the inputs up.

The features of a layer are those of the fused network as far as it is solved; its targets are the
outputs of the chosen units in their own clients' networks, on the same inputs. A layer whose output
is added to something known (a residual stream) makes up for what that lacks. The last layer is
solved for the teacher's outputs. A normalization's scale and shift are solved for as well, its
running statistics are the units' own, so that with all units of all clients nothing changes: they
are part of what a client's network computes, and draws have others.

The solver computes the change from the start. A `Pass` of the fused network through a batch stops
at each layer and continues from there once the layer is solved. So the work grows with the depth
and not with its square. A pass that `memory` is not enough for begins again at the inputs.
"""

from collections.abc import Callable

from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.fusion.assembly import FREE, Origins
from fedbayes.fusion.layers import Fit
from fedbayes.fusion.normal import NormalEquations
from fedbayes.fusion.patches import patches, picked
from fedbayes.fusion.targets import Targets
from fedbayes.models.steps import Pass, Steps, kind


class Solver:
    """The fused network while it is solved for.

    Args:
        steps: its operations.
        tensors: its parameters and buffers at the start.
        origins: of its units.
        anchor: the donor of what comes from no client in particular.
        targets: what its layers are to say.
        draw: batches of inputs by number.
        batches: how many there are.
        memory: bytes of its activations that are kept from layer to layer.
    """

    def __init__(
        self,
        steps: Steps,
        tensors: Tensors,
        origins: Origins,
        anchor: int,
        targets: Targets,
        draw: Callable[[int], Tensor],
        batches: int,
        memory: int,
    ) -> None:
        self.steps, self.tensors, self.origins, self.anchor = steps, tensors, origins, anchor
        self.targets, self.draw, self.batches = targets, draw, batches
        self.memory, self._passes = memory, dict[int, Pass]()

    def solve(self, fit: Fit, ridge: float) -> None:
        """Solve for one layer; layers come in their order."""
        old = self.tensors[fit.weight].transpose(0, fit.rows)
        split = 1 if fit.norm else int(self.steps.argument(fit.node, "groups") or 1)
        if fit.norm:
            start = old[:, None, None]
        else:
            kept = self._own_columns(fit, old)
            start = kept.reshape(split, len(old) // split, -1).mT
        shift = start.new_zeros(len(start), 1, start.shape[2])
        if fit.bias is not None:
            shift = self.tensors[fit.bias].reshape(shift.shape)
        equations = NormalEquations(*start.shape)
        for number in range(fit.batches(self.batches)):
            features, before = self._features(fit, number)
            targets = self.targets.of(fit, number)
            if before is not None:
                targets = targets - before
            if fit.norm:
                targets = targets.T[:, :, None]
            else:
                targets = targets.reshape(len(targets), split, -1).transpose(0, 1)
            # What is left by the start: the sums' rounding is that of a small change.
            equations.add(features, targets - features @ start - shift)
        weight, bias = equations.solve(ridge, intercept=fit.bias is not None)
        fresh = (start + weight).mT.reshape(old.shape)
        self.tensors[fit.weight] = fresh.transpose(0, fit.rows).contiguous()
        if fit.bias is not None:
            self.tensors[fit.bias] = (shift[:, 0] + bias).reshape(-1)
        if self.steps.read_before(fit.node, fit.weight, fit.bias):
            self._passes.clear()

    def _own_columns(self, fit: Fit, weight: Tensor) -> Tensor:
        """The weights, rows first, without those that other units of a client determine."""
        if weight.shape[1] == 1:
            return weight
        rows, columns = (
            self.origins.at(fit.weight, axis).donor for axis in (fit.rows, 1 - fit.rows)
        )
        stranger = (rows[:, None] >= 0) & (rows[:, None] != self.anchor) & (columns == FREE)
        stranger |= (rows[:, None] == FREE) & (columns >= 0) & (columns != self.anchor)
        return weight * ~stranger.reshape(*stranger.shape, *[1] * (weight.ndim - 2))

    def _features(self, fit: Fit, number: int) -> tuple[Tensor, Tensor | None]:
        """Features [problems, n, F] of the fused network, and what its outputs are added to."""
        passed = self._passes.pop(number, None) or Pass(self.steps, self.draw(number))
        step, places = passed.at(fit.node, self.tensors), fit.places(number)
        before = None
        if fit.rest is not None:
            before = picked(passed.value(fit.rest[1], self.tensors), fit.channel, places)
        computed = step.arguments.get("bias") if fit.bias is None else None
        if computed is not None:
            before = computed if before is None else before + computed
        if sum(one.nbytes for one in self._passes.values()) + passed.nbytes <= self.memory:
            self._passes[number] = passed
        given = step.arguments
        if fit.norm:
            plain = {**given, "weight": None} | ({"bias": None} if "bias" in given else {})
            value = fit.node.target(**plain)  # type: ignore[operator]
            return picked(value, fit.channel, places).T[:, :, None], before
        if kind(fit.node) == "linear":
            return picked(given["input"], -1, places)[None], before
        shape = step.value.movedim(fit.channel, -1).shape[:-1]
        return patches(given, shape, places, transposed=fit.rows == 1), before
