"""How networks are matched, with the names that the command line and configs use."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Only
from fedbayes.matching.costs import NewAtoms, Objective


def _uncapped(value: Any) -> Any:
    return 0 if value is None or value == "none" else value


class MatchingSettings(Settings):
    """Parameters of the model behind the matching (GPI-FNM paper, section 4).

    Examples:
        >>> from fedbayes.matching import MatchingSettings
        >>> MatchingSettings(sigma0=10.0, gamma=30.0).gamma
        30.0
    """

    sigma: float = Field(
        1.0, gt=0, description="standard deviation of a client's weights around the global weights"
    )
    sigma0: float = Field(
        1.0, gt=0, description="standard deviation of global weights around their mean"
    )
    gamma: float = Field(
        1.0, gt=0, description="mass of the process. A larger value gives more neurons"
    )
    epsilon: float = Field(0.3, ge=0, description="weight of the KL term. 0: PFNM")
    popularity_cap: Annotated[int, BeforeValidator(_uncapped)] = Field(
        10,
        ge=0,
        description="largest number of members that counts. 0 or none: the paper's formula",
    )
    popularity_weight: float = Field(
        2.0, ge=0, description="factor of the log-odds. 2: the paper. 1: PFNM's program"
    )
    new_atoms: NewAtoms = Field(
        "paper",
        description="extra cost of a client's k-th unshared neuron relative to its first. paper: "
        "2 log k. exchangeable: 0, so that the prior does not depend on the order of clients",
    )
    iterations: int = Field(5, ge=0, description="sweeps over the clients after the first pass")
    bias_mean: float = Field(0.0, description="mean of hidden biases at initialization")
    alternations: int = Field(
        0,
        ge=0,
        description="largest number of passes up and down the layers. 0: top down once, "
        "as published",
    )
    starts: Annotated[int, Only("alternations")] = Field(
        1,
        ge=1,
        description="number of top-down matchings to start from. The best objective is used",
    )
    start_gamma: Annotated[float | None, Only("alternations")] = Field(
        None, gt=0, description="gamma of these top-down matchings. Default: gamma"
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
