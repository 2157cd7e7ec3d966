"""APFL: every client mixes a model of its own with the global one, and learns the mixture."""

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Loss,
    Problem,
    Report,
    RoundContext,
    Solved,
    Tree,
    nll,
)
from fedbayes.contracts.needs import weights_alone
from fedbayes.contracts.personal import PersonalModels, PersonalTensors
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part

ALPHA = "mixture/alpha"
"""Name of a client's α_k, a scalar."""


class Apfl(PersonalModels):
    """Adaptive personalized federated learning (Deng et al. 2020, Algorithm 1, Eq. 10).

    A client predicts with v̄_k = α_k v_k + (1 − α_k) w_k. In every step its copy w_k of the global
    model goes down f_k(w_k), and its own v_k and α_k go down f_k(v̄_k), whose derivatives are

        ∂/∂v_k = α_k ∇f_k(v̄_k),   ∂/∂α_k = ⟨v_k − w_k, ∇f_k(v̄_k)⟩.

    It reports w_k, which the server averages, and keeps v_k and α_k.
    """

    name = "apfl"
    about = About(
        "clients mix their own model with the global one",
        "Deng et al. 2020",
        needs=(weights_alone,),
    )

    alpha: float = Field(0.5, ge=0, le=1, description="initial α_k of every client. 0: FedAvg")
    alpha_lr: float = Field(0.1, ge=0, description="learning rate of α_k. 0: α_k is fixed")

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train the global copy, the client's own model, and its share in the mixture."""
        network = at.run.network
        sent = network.prepare(dense(message))
        own = network.prepare(client.tensors) if client.tensors else self._begun(sent)
        alpha: Callable[[list[Tensor]], torch.optim.Optimizer] = self._alpha_optimizer
        return Problem({**sent, **own}, param_groups={ALPHA: alpha}, project=_bound)

    def _begun(self, sent: Tensors) -> Tensors:
        """A newcomer's own model is the server's."""
        like = next(iter(sent.values()))
        return named("own", sent) | {ALPHA: like.new_full((), self.alpha)}

    def _alpha_optimizer(self, leaves: list[Tensor]) -> torch.optim.Optimizer:
        """Plain gradient steps."""
        return torch.optim.SGD(leaves, lr=self.alpha_lr)

    def loss(self, run: Federation) -> Loss:
        """f_k(w_k) + f_k(v̄_k), in whose second term the global copy is held fixed."""
        likelihood = nll(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            copy = {n: t for n, t in parameters.items() if "/" not in n}
            mixed = _mixed(parameters, {n: t.detach() for n, t in copy.items()})
            return likelihood(copy, batch, given, noise) + likelihood(mixed, batch, given, noise)

        return loss

    def validation(self, run: Federation) -> Loss:
        """f_k(v̄_k), without dropout."""
        return nll(run, training=False, weights=lambda found, _: _mixed(found, found))

    def report(
        self, solved: Solved, problem: Problem, client: PersonalTensors, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Report the global copy, keep the client's own model and its share."""
        ended = solved.parameters
        copy: Message = {n: t for n, t in ended.items() if "/" not in n}
        own = {n: t for n, t in ended.items() if "/" in n}
        info = {**solved.info, "alpha": float(ended[ALPHA])}
        return Report(copy, self.weight(solved)), PersonalTensors(own), info

    def personal_model(
        self, message: Message, report: Report | None, client: PersonalTensors, run: Federation
    ) -> Tensors | None:
        """Return the mixture with the global copy, or with the server's weights between rounds."""
        copy = dense(report.tensors if report is not None else message)
        return _mixed(client.tensors, copy) if client.tensors else copy


def _mixed(own: Tensors, copy: Tensors) -> Tensors:
    """α v + (1 − α) w."""
    alpha = own[ALPHA]
    return {n: copy[n] + alpha * (v - copy[n]) for n, v in part(own, "own").items()}


def _bound(parameters: Tensors, given: Tree, lr: float) -> None:
    """Keep α between 0 and 1, in place."""
    parameters[ALPHA].clamp_(0, 1)
