"""How networks are matched, with the names that the command line and configs use."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Only
from fedbayes.matching.costs import NewAtoms, Objective


def _uncapped(value: Any) -> Any:
    return 0 if value is None or value == "none" else value


class MatchingSettings(Settings):
    """Parameters of the model behind the matching (GPI-FNM paper, section 4)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sigma: float = Field(
        1.0, gt=0, description="standard deviation of a client's weights from the global"
    )
    sigma0: float = Field(
        1.0, gt=0, description="standard deviation of global weights from their mean"
    )
    gamma: float = Field(1.0, gt=0, description="mass of the process: more of it, more neurons")
    epsilon: float = Field(0.3, ge=0, description="weight of the KL term; 0 is PFNM")
    popularity_cap: Annotated[int, BeforeValidator(_uncapped)] = Field(
        10, ge=0, description="members above this count no more; 0 or none: the paper's formula"
    )
    popularity_weight: float = Field(
        2.0, ge=0, description="factor of the log-odds: 2 in the paper, 1 in PFNM's program"
    )
    new_atoms: NewAtoms = Field(
        "paper",
        description="what the k-th neuron that a client shares with nobody costs relative to the "
        "first: "
        "paper, 2 log k; exchangeable, nothing, so that the prior is the same in every order of "
        "the clients",
    )
    iterations: int = Field(5, ge=0, description="sweeps over the clients after the first pass")
    bias_mean: float = Field(0.0, description="mean of hidden biases, where they were initialized")
    alternations: int = Field(
        0, ge=0, description="passes up and down the layers at most; 0: top down once, as published"
    )
    starts: Annotated[int, Only("alternations")] = Field(
        1, ge=1, description="top-down matchings to alternate from; the best objective wins"
    )
    start_gamma: Annotated[float | None, Only("alternations")] = Field(
        None, gt=0, description="gamma of those top-down matchings, if it is to be another"
    )

    @property
    def objective(self) -> Objective:
        """The numbers of the objective."""
        return Objective(
            self.epsilon,
            self.gamma,
            self.popularity_cap or None,
            self.popularity_weight,
            self.new_atoms,
        )
