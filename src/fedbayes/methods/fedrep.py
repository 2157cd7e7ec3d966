"""FedRep: a shared representation, and heads of the clients' own that are trained first."""

from pydantic import Field

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Loss,
    Problem,
    Report,
    RoundContext,
    Solved,
    nll,
)
from fedbayes.contracts.personal import LastLayers, PersonalTensors, beside_fixed, solved_apart
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples


class FedRep(LastLayers):
    """Shared representations (Collins et al. 2021, Algorithm 1).

    A client first takes steps on its head h_k alone, with the server's representation φ fixed, and
    then on φ alone, with its new head fixed:

        h_k ← argmin f_k(h, φ),   φ_k ← a few steps down f_k(h_k, φ).

    It reports φ_k, which the server averages, and keeps h_k.
    """

    name = "fedrep"
    about = About(
        "a shared representation and heads that stay with the clients",
        "Collins et al. 2021",
    )

    head_epochs: int = Field(
        1, ge=1, description="passes over its samples in which a client trains only its head"
    )

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood, where some layers are given."""
        return nll(run, weights=beside_fixed)

    def validation(self, run: Federation) -> Loss:
        """The same, without dropout."""
        return nll(run, training=False, weights=beside_fixed)

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train the representation below a fixed head."""
        network = at.run.network
        return Problem(
            network.prepare(dense(message)), given={"fixed": network.prepare(client.tensors)}
        )

    def local(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Train the head above the server's representation, and then the representation."""
        network, loss = at.run.network, self.loss(at.run)
        body = {n: t.clone() for n, t in network.prepare(dense(message)).items()}
        head = Problem(network.prepare(client.tensors), given={"fixed": body})
        found = solved_apart(at, "head", head, loss, samples, epochs=self.head_epochs)
        return super().local(message, PersonalTensors(found.parameters), samples, at)

    def report(
        self, solved: Solved, problem: Problem, client: PersonalTensors, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Report the representation, keep the head."""
        return Report(dict(solved.parameters), self.weight(solved)), client, solved.info
