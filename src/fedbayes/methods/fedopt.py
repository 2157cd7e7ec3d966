"""Generalized FedAvg: the M-step by one step of a server optimizer."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import About, Known
from fedbayes.contracts.drift import GeneralizedFedAvg
from fedbayes.core.fields import Chosen, Tuned
from fedbayes.inference import optimizers


class Reptile(GeneralizedFedAvg):
    """Server gradient descent: w ← w + lr (mean φ_s − w), the update of Reptile."""

    name = "reptile"
    about = About(
        "a step of gradient descent towards the mean",
        "Nichol et al. 2018; EM view: Louizos et al. 2021, section 2.1",
    )

    server_lr: float = Field(1.0, gt=0, description="learning rate of the server. 1: FedAvg")

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(parameters, lr=self.server_lr)


class FedAvgM(GeneralizedFedAvg):
    """Server gradient descent with momentum."""

    name = "fedavgm"
    about = About("server gradient descent with momentum", "Hsu et al. 2019")

    server_lr: float = Field(1.0, gt=0, description="learning rate of the server")
    server_momentum: Annotated[float, Chosen()] = Field(
        0.9, ge=0, lt=1, description="momentum of the server"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Less momentum than over many rounds: steps of 0.9 overshoot in the first ones."""
        return {**super().recommended(known), "method.server_momentum": 0.5}

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self.server_lr, momentum=self.server_momentum)


class Adaptive(GeneralizedFedAvg):
    """What server optimizers with two moments share.

    Reddi et al. 2021 (Algorithm 2) divide the first moment by the root of the second as they are,
    with a second moment of τ² = `eps`² at the start. Adam as it is known (Kingma and Ba 2015)
    corrects both for where they start, by 1 − βᵗ in round t. So the first rounds' steps differ:
    without correction they are up to twice as long, or a tenth as long where drifts are small
    relative to `eps`.
    """

    server_lr: Annotated[float, Chosen(), Tuned()] = Field(
        1e-2, gt=0, description="learning rate of the server"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-3, gt=0, description="smallest value of the denominator")
    bias_correction: Annotated[bool, Chosen()]

    kind: ClassVar[Literal["adam", "yogi"]]

    def recommended(self, known: Known) -> dict[str, Any]:
        """A server's rate that twenty rounds suffice for."""
        return {**super().recommended(known), "method.server_lr": 0.02}

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """Adam or Yogi with the server's rate and moments."""
        return optimizers.adaptive(
            self.kind,
            parameters,
            lr=self.server_lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            bias_correction=self.bias_correction,
        )


class FedAdam(Adaptive):
    """Adam at the server: by default PyTorch's, with bias correction, which the paper has not."""

    name = "fedadam"
    about = About("Adam at the server", published=MappingProxyType({"bias_correction": False}))
    kind = "adam"

    bias_correction: Annotated[bool, Chosen()] = Field(
        True,
        description="whether moments have a bias correction, as in Adam. false: as in Reddi et "
        "al. 2021",
    )


class FedYogi(Adaptive):
    """Yogi at the server, without bias correction, as in the paper."""

    name = "fedyogi"
    about = About("Yogi at the server")
    kind = "yogi"

    bias_correction: Annotated[bool, Chosen()] = Field(
        False,
        description="whether moments have a bias correction, as in Adam. false: as in Reddi et "
        "al. 2021",
    )
