"""FedProx: the Gaussian prior of positive precision."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedbayes.contracts import (
    About,
    ClientNote,
    Federation,
    Loss,
    PointEstimate,
    Prior,
    Problem,
    RoundContext,
    Stateless,
    Weights,
    nll,
)
from fedbayes.contracts.run import given_centre, with_centre
from fedbayes.core.fields import Tuned
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples


class FedProx(PointEstimate[Weights]):
    """FedAvg with a pull towards the server's weights.

    Hard EM on p(φ_s | w) = N(w, 1/(λ N_s)): a client minimizes its mean nll(φ) + λ/2 ‖φ − w‖² (EM
    paper, Eq. 7 with the prior of Eq. 3, whose λ is λ N_s here), the server averages. λ = 0 is
    FedAvg.
    """

    name = "fedprox"
    about = About(
        "FedAvg with a proximal term toward the server's weights",
        "Li et al. 2018; EM view: Louizos et al. 2021, section 2.1",
    )
    server_state = Weights

    proximal: Annotated[float, Tuned(1e-4, 10)] = Field(
        0.01,
        ge=0,
        description="λ, factor of ½ ‖φ − w‖² added to the mean loss of a client; the precision of "
        "the prior around the server is λ N_s",
    )

    def note(self, samples: int, run: Federation) -> ClientNote:
        """A Gaussian of precision λ N_s."""
        return ClientNote(Prior("precision", self.proximal * samples) if self.proximal else None)

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights w, which are also what draws."""
        problem = super().problem(message, client, samples, at)
        centre = {n: w for n, w in problem.start.items() if n not in at.run.network.buffers}
        return replace(problem, given={"centre": centre} if self.proximal else {})

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus λ/2 ‖φ − w‖², over the trainable weights."""
        return with_centre(run, self.proximal, given_centre) if self.proximal else nll(run)
