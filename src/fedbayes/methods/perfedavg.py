"""Per-FedAvg: a global model from which a client's own is a few gradient steps away."""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import About, Federation, Info, Loss, Report, RoundContext, Tree, nll
from fedbayes.contracts.needs import weights_alone
from fedbayes.contracts.personal import PersonalModels, PersonalTensors
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.inference.controls import mean_gradient


class PerFedAvg(PersonalModels):
    """Personalized federated averaging by meta-learning (Fallah et al. 2020, Algorithm 1),

        min_w Σ_k p_k f_k(w − α ∇f_k(w)).

    Each step of a client takes the inner gradient on one half of a batch, and the outer loss on
    the other. Its derivative holds the Hessian, (I − α ∇²f_k(w)) ∇f_k(w − α ∇f_k(w)), or leaves it
    out (`gradient = "first-order"`, the paper's Per-FedAvg (FO)). After training, a client adapts
    the weights where training ended by `adaptation` steps on all of its samples, and predicts
    with them. It reports the weights as they were before these steps.
    """

    name = "perfedavg"
    about = About(
        "a global model for adaptation to a client in a few steps",
        "Fallah et al. 2020",
        needs=(weights_alone,),
    )

    alpha: float = Field(0.05, ge=0, description="α, learning rate of the inner step. 0: FedAvg")
    adaptation: int = Field(
        5, ge=0, description="steps with α in which a client adapts the model before it predicts"
    )
    gradient: Literal["exact", "first-order"] = Field(
        "exact", description="derivative of the outer loss: exact, or without the Hessian"
    )

    def loss(self, run: Federation) -> Loss:
        """The loss on the second half of a batch, after a step on the first.

        A batch of one sample is both halves.
        """
        likelihood = nll(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            half = len(batch.y) // 2
            inner = Samples(batch.x[:half], batch.y[:half]) if half else batch
            outer = Samples(batch.x[half:], batch.y[half:])
            slope = torch.func.grad(lambda w: likelihood(w, inner, given, noise))(parameters)
            if self.gradient == "first-order":
                slope = {name: g.detach() for name, g in slope.items()}
            adapted = {n: w - self.alpha * slope[n] for n, w in parameters.items()}
            return likelihood(adapted, outer, given, noise)

        return loss

    def local(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Train, and then adapt the weights to the client's samples."""
        report, client, info = super().local(message, client, samples, at)
        weights = dense(report.tensors)
        loss, training = nll(at.run, training=False), at.run.training
        sizes = training.batch_sizes(len(samples.y), all_samples=True)
        for _ in range(self.adaptation):
            slope = mean_gradient(weights, loss, samples, sizes, list(weights))
            weights = {n: w - self.alpha * slope[n] for n, w in weights.items()}
        return report, replace(client, tensors=weights), info
