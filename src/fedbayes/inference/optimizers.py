"""Optimizers: the one that PyTorch lacks, a lean one, and any of them as a pure function."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, overload

import torch
from pydantic import Field
from torch import Tensor
from torch.optim.sgd import sgd

from fedbayes.core.fields import Choosable, Chosen
from fedbayes.core.tensors import Tensors
from fedbayes.inference.schedules import ServerSchedule


class OptimizerMoments(torch.optim.Optimizer):
    """Adam or Yogi as Reddi et al. 2021 (Algorithm 2) have them, or with bias correction.

    m ← β₁ m + (1 − β₁) g;  θ ← θ − lr m / (√v + ε), with v started at `initial`. In Adam
    v ← β₂ v + (1 − β₂) g², and in Yogi (Zaheer et al. 2018) it grows and shrinks additively,
    v ← v − (1 − β₂) sign(v − g²) g². With `bias_correction`, m / (1 − β₁ᵗ) and v / (1 − β₂ᵗ)
    stand instead of m and v in step t.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
        initial: float = 1e-6,
        *,
        kind: Literal["adam", "yogi"] = "yogi",
        bias_correction: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "initial": initial})
        self._kind, self._corrected = kind, bias_correction

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.full_like(parameter, group["initial"])
                    if self._corrected:
                        state["step"] = torch.zeros((), dtype=torch.float64)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                square = parameter.grad.square()
                m.lerp_(parameter.grad, 1 - first)
                if self._kind == "adam":
                    v.lerp_(square, 1 - second)
                else:
                    v.sub_((1 - second) * torch.sign(v - square) * square)
                if self._corrected:
                    state["step"] += 1
                    taken = float(state["step"])
                    m, v = m / (1 - first**taken), v / (1 - second**taken)
                parameter.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))
        return loss


def adaptive(
    kind: Literal["adam", "yogi"],
    leaves: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool,
) -> torch.optim.Optimizer:
    """Adam or Yogi over leaf tensors, with or without bias correction.

    Adam with it is PyTorch's, whose v starts at 0. Without it v starts at ε², as in Reddi et al.
    2021; Yogi's v starts at 1e-6.
    """
    if kind == "adam" and bias_correction:
        return torch.optim.Adam(leaves, lr=lr, betas=betas, eps=eps)
    own = {"initial": eps**2} if kind == "adam" else {}
    return OptimizerMoments(
        leaves, lr, betas, eps, kind=kind, bias_correction=bias_correction, **own
    )


class Adam(torch.optim.Adam):
    """Adam, or AMSGrad, in one pass through memory where PyTorch has that for the CPU.

    That pass takes a gradient for laid out as its leaf is, and would add it in another order where
    it is not, as those of matrices and of channels-last convolutions; so it is laid out first.
    """

    def __init__(
        self, leaves: Sequence[Tensor], lr: float, weight_decay: float, amsgrad: bool
    ) -> None:
        fused = all(leaf.is_cpu and leaf.is_floating_point() for leaf in leaves)
        super().__init__(
            leaves, lr=lr, weight_decay=weight_decay, amsgrad=amsgrad, fused=fused or None
        )
        self._leaves = leaves if fused else ()

    def step(self) -> None:  # type: ignore[override]  # nobody here has a closure
        """One update of every leaf that has a gradient."""
        for leaf in self._leaves:
            if leaf.grad is not None and leaf.grad.stride() != leaf.stride():
                leaf.grad = torch.empty_like(leaf).copy_(leaf.grad)
        super().step()


class Sgd:
    """The steps of `torch.optim.SGD`, bit for bit, by the same function of PyTorch, without the
    hooks around it, which are a seventh of a client's time where networks are small.
    """

    def __init__(
        self, leaves: Sequence[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        self.leaves, self.lr = leaves, lr
        self.momentum, self.weight_decay = momentum, weight_decay
        self._averages: list[Tensor | None] = [None] * len(leaves)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every leaf that has a gradient."""
        used = [place for place, leaf in enumerate(self.leaves) if leaf.grad is not None]
        averages = [self._averages[place] for place in used]
        sgd(
            [self.leaves[place] for place in used],
            [leaf.grad for leaf in self.leaves if leaf.grad is not None],
            averages,
            foreach=self.leaves[0].is_cuda,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for place, average in zip(used, averages, strict=True):
            self._averages[place] = average


def step(
    build: Callable[[list[Tensor]], torch.optim.Optimizer],
    parameters: Tensors,
    gradients: Tensors,
    state: Tensors,
    factor: float = 1.0,
) -> tuple[Tensors, Tensors]:
    """One step of an optimizer as a pure function of parameters, gradients and its state.

    Args:
        build: makes the optimizer over leaf tensors.
        parameters: where to step from; not changed.
        gradients: of the same names and shapes.
        state: what the last step returned, or {} before the first one.
        factor: what its learning rate is multiplied by in this step.

    Returns:
        The new parameters, and the optimizer state as `parameter:quantity` tensors.
    """
    names = list(parameters)
    leaves = [parameters[name].detach().clone() for name in names]
    optimizer = build(leaves)
    stored: dict[int, dict[str, Any]] = {}
    for key, tensor in state.items():
        name, _, quantity = key.rpartition(":")
        stored.setdefault(names.index(name), {})[quantity] = tensor.clone()
    if stored:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": stored})
    for group in optimizer.param_groups:
        group["lr"] *= factor
    for leaf, name in zip(leaves, names, strict=True):
        leaf.grad = gradients[name].to(leaf.dtype)
    optimizer.step()
    kept = {
        f"{name}:{quantity}": tensor.detach()
        for name, leaf in zip(names, leaves, strict=True)
        for quantity, tensor in optimizer.state[leaf].items()
        if isinstance(tensor, Tensor)
    }
    return {name: leaf.detach() for name, leaf in zip(names, leaves, strict=True)}, kept


class ServerOptimizer(ServerSchedule, Choosable):
    """The hyperparameters of a method whose server takes gradient steps on its weights."""

    server_optimizer: Literal["sgd", "adam", "yogi"] = Field(
        "sgd",
        description="optimizer of the server. sgd with learning rate 1 gives the clients' mean",
    )
    server_lr: Annotated[float | None, Chosen()] = Field(
        None, gt=0, description="learning rate of the server; none: 1 for sgd, or else 0.001"
    )

    def server_step(
        self, weights: Tensors, gradients: Tensors, state: Tensors, factor: float
    ) -> tuple[Tensors, Tensors]:
        """One step down the gradients: the new weights and the optimizer state.

        Args:
            weights: of the server; not changed.
            gradients: of the same names and shapes.
            state: what the last step returned, or {} before the first one.
            factor: what the learning rate is multiplied by, as `server_factor` gives it.
        """
        return step(self.build_server, weights, gradients, state, factor)

    def build_server(self, leaves: list[Tensor]) -> torch.optim.Optimizer:
        """The server's optimizer over its weights."""
        match self.server_optimizer:
            case "sgd":
                return torch.optim.SGD(leaves, lr=self.server_lr or 1.0)
            case "adam":
                return torch.optim.Adam(leaves, lr=self.server_lr or 1e-3)
            case "yogi":
                return OptimizerMoments(leaves, lr=self.server_lr or 1e-3)
