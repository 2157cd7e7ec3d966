"""The `[training]` table of a config."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from fedbayes.core.fields import Choosable, Chosen, Only, Place, Tuned
from fedbayes.core.lazy import called
from fedbayes.errors import ConfigError
from fedbayes.inference.schedules import SCHEDULES, Schedule, factor

if TYPE_CHECKING:
    from torch import Tensor

    from fedbayes.inference.problem import Stepper


OPTIMIZER = "function(parameters, lr=..., weight_decay=...)"
"""How a user's own optimizer is called; without weight_decay where that is 0."""


class LocalTraining(Choosable):
    """How a client trains: the `[training]` table of a config.

    Examples:
        >>> from fedbayes.inference.settings import LocalTraining
        >>> LocalTraining(optimizer="adam", lr=0.003, epochs=2).lr
        0.003
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    optimizer: Annotated[Literal["sgd", "adam", "amsgrad", "adamax"] | Place, Chosen()] = Field(
        "sgd",
        description="client optimizer, or your own as package.module:name, called as "
        f"{OPTIMIZER}, such as torch.optim:RMSprop",
    )
    lr: Annotated[float, Chosen(), Tuned()] = Field(
        0.1, gt=0, description="learning rate in the first round"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty of the optimizer")
    epochs: Annotated[int, Only("steps", None), Chosen()] = Field(
        1, ge=1, description="passes over the client's data per round"
    )
    steps: int | None = Field(
        None, ge=1, description="optimizer steps per round, instead of epochs"
    )
    batch_size: int = Field(32, ge=1, description="number of samples in a training step")
    last_batch: Literal["keep", "drop", "merge"] = Field(
        "keep",
        description="the last samples of an epoch, if fewer than batch_size. keep: they form a "
        "smaller batch. drop: they are left out. merge: they join the batch before. A client with "
        "fewer samples than batch_size has one batch",
    )
    patience: Annotated[int | None, Chosen()] = Field(
        None, ge=1, description="early stopping at a client: epochs without improvement"
    )
    min_improvement: Annotated[float, Only("patience")] = Field(
        0.0,
        ge=0,
        description="smallest decrease of the loss that counts as an improvement (patience)",
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of a client's training samples on which patience monitors the loss, at "
        "least one sample. 0: it monitors the training loss",
    )
    class_weights: Literal["none", "balanced"] | tuple[Annotated[float, Field(gt=0)], ...] = Field(
        "none",
        description="factor of the loss of each class. none: 1. balanced: inverse to the frequency "
        "of the class at the client. Or one number per class, in order",
    )
    focal: float = Field(
        0.0,
        ge=0,
        description="γ of the focal loss, which weights a sample by (1 − p)^γ, where p is the "
        "probability of its class. 0: cross-entropy",
    )
    schedule: Schedule = Field(
        "constant",
        description="schedule of the learning rate over rounds: constant, exponential, step, "
        "cosine, or package.module:function of the round and the number of rounds",
        examples=list(SCHEDULES),
    )
    decay: Annotated[float, Only("schedule", "exponential", "step")] = Field(
        0.99, gt=0, le=1, description="factor per round (exponential) or per decay_every (step)"
    )
    decay_every: Annotated[int, Only("schedule", "step")] = Field(
        10, ge=1, description="rounds between decays (step)"
    )

    @model_validator(mode="after")
    def _check(self) -> "LocalTraining":
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum works only with optimizer = 'sgd', not '{self.optimizer}'")
        if self.patience is not None and self.steps is not None:
            raise ValueError("patience counts epochs. Set epochs instead of steps")
        if self.validation and self.patience is None:
            raise ValueError("validation works only with patience. Set patience too")
        return self

    @property
    def reweights(self) -> bool:
        """Whether samples count differently by their class or probability."""
        return self.class_weights != "none" or self.focal > 0

    def learning_rate(self, round: int, rounds: int) -> float:
        """The learning rate of round `round` (from 1) of `rounds`.

        Raises:
            ConfigError: as for `factor`.
        """
        return self.lr * factor(self.schedule, self.decay, self.decay_every, round, rounds)

    def build_optimizer(self, parameters: "list[Tensor]", lr: float) -> "Stepper":
        """A fresh optimizer of these settings over leaf tensors.

        Raises:
            ConfigError: a user's own cannot be made.
        """
        import torch

        from fedbayes.inference.optimizers import Adam, Sgd

        decay = self.weight_decay
        match self.optimizer:
            case "sgd":
                return Sgd(parameters, lr, self.momentum, decay)
            case "adamax":
                return torch.optim.Adamax(parameters, lr=lr, weight_decay=decay)
            case "adam" | "amsgrad":
                amsgrad = self.optimizer == "amsgrad"
                return Adam(parameters, lr, decay, amsgrad)
            case _:
                more = {"weight_decay": decay} if decay else {}
                found = called(self.optimizer, "optimizer", OPTIMIZER, parameters, lr=lr, **more)
                if not hasattr(found, "step"):
                    raise ConfigError(
                        f"the optimizer {self.optimizer!r} gave a {type(found).__name__}, which "
                        "has no step()"
                    )
                stepper: Stepper = found
                return stepper

    def batch_sizes(self, samples: int, *, all_samples: bool = False) -> list[int]:
        """Sizes of the batches of an epoch for a client with this number of samples.

        Args:
            samples: their number.
            all_samples: whether those that `drop` leaves out are merged into the last batch.
        """
        whole, rest = divmod(samples, self.batch_size)
        sizes = [self.batch_size] * whole
        if rest and (self.last_batch == "keep" or not whole):
            sizes.append(rest)
        elif rest and (self.last_batch == "merge" or all_samples):
            sizes[-1] += rest
        return sizes

    def step_count(self, samples: int) -> int:
        """Optimizer steps in a round for a client with this number of samples."""
        return self.steps or self.epochs * len(self.batch_sizes(samples))
