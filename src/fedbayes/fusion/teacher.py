"""What the clients' networks say together: the teacher of a fusion in function space."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
"""From inputs [n, ...] to outputs [n, K], in evaluation mode; without gradients of weights."""


class Teacher:
    """The clients' networks as one function, which a fused network is to say the same as.

    Where counts are known, outputs are class-share logits, Σ_s share_sk f_sk(x) with the outputs f
    of client s centred over the classes: a client says as much of a class as it has of its samples.
    Else they are the logarithm of the mean of the clients' probabilities.

    Args:
        clients: their networks.
        shares: of each client in each class, [S, K], columns that add to 1; None: not known.
    """

    def __init__(self, clients: Sequence[Function], shares: Tensor | None = None) -> None:
        self.clients, self.shares = clients, shares

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [n, K] at inputs [n, ...]."""
        return self.of([client(x) for client in self.clients])

    def of(self, outputs: Sequence[Tensor]) -> Tensor:
        """What the clients' outputs, each [n, K], come to."""
        said = torch.stack(list(outputs))
        if self.shares is None:
            mean: Tensor = said.log_softmax(-1).logsumexp(0)
            return mean
        centred = said - said.mean(-1, keepdim=True)
        return (self.shares.to(said)[:, None] * centred).sum(0)
