"""Ditto: a personal model of every client, regularized toward the global one."""

from pydantic import Field

from fedbayes.contracts import About, Federation, Info, Loss, Problem, Report, RoundContext
from fedbayes.contracts.personal import PersonalModels, PersonalTensors, solved_apart
from fedbayes.contracts.run import given_centre, with_centre
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples


class Ditto(PersonalModels):
    """Personalization by multi-task learning (Li et al. 2021, Algorithm 1).

    The global model w is that of FedAvg. With the same samples a client takes further steps on
    its own v_k, from where its last round ended (the first: from w), down

        h_k(v_k; w) = F_k(v_k) + λ/2 ‖v_k − w‖².

    λ = 0 is training alone, a large λ keeps v_k at w.
    """

    name = "ditto"
    about = About(
        "FedAvg, and personal models regularized toward its model",
        "Li et al. 2021 (Ditto)",
    )

    strength: float = Field(
        0.1,
        ge=0,
        description="λ, strength of the regularization of a client's own model toward "
        "the global one",
    )

    def personal_problem(
        self, message: Message, client: PersonalTensors, at: RoundContext
    ) -> Problem:
        """Train the client's own model in addition to the server's weights."""
        network = at.run.network
        sent = network.prepare(dense(message))
        start = network.prepare(client.tensors) if client.tensors else sent
        centre = {n: w for n, w in sent.items() if n not in network.buffers}
        return Problem(start, given={"centre": centre})

    def personal_loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus λ/2 ‖v_k − w‖²."""
        return with_centre(run, self.strength, given_centre)

    def local(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Train the global model, and then the client's own."""
        report, client, info = super().local(message, client, samples, at)
        own = solved_apart(
            at,
            "personal",
            self.personal_problem(message, client, at),
            self.personal_loss(at.run),
            samples,
        )
        return report, PersonalTensors(own.parameters), {**info, "personal_loss": own.loss}
