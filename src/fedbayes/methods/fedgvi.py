"""FedGVI: partitioned variational inference with losses and divergences that outliers move less."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fedbayes.contracts import About, Federation, Known
from fedbayes.contracts.drawn import Fit
from fedbayes.contracts.mean_field import MeanField
from fedbayes.core.fields import Chosen, Only, Tuned
from fedbayes.errors import ConfigError
from fedbayes.likelihoods.robust import density_power, generalized_cross_entropy, has_density_power


def _loss_of_likelihood(method: Any, run: Federation) -> None:
    """The likelihood has the loss, which nothing else changes."""
    loss, likelihood = method.data_loss, run.likelihood
    if loss != "log" and run.training.reweights:
        raise ConfigError(
            "training.class_weights and training.focal have no effect on method.data_loss = "
            f"'{loss}'. Set it to 'log', or leave them out"
        )
    if loss == "gce" and not likelihood.target.classes:
        raise ConfigError(
            "generalized cross-entropy needs probabilities of classes, but the likelihood is "
            f"{likelihood.name}. Set method.data_loss = 'beta' or 'log'"
        )
    if loss == "beta" and not has_density_power(likelihood):
        raise ConfigError(
            f"the density-power loss has no closed form for the likelihood {likelihood.name}. Set "
            "method.data_loss = 'log'"
        )


class FedGvi(MeanField):
    """PVI whose clients refine their factors by a generalized posterior (Mildner et al. 2025).

    A client minimizes D(s_new ‖ s/s_i · p(θ)^(1/K)) + E_{θ ~ s_new}[Σ_{y ∈ D_i} L(y, θ)], with the
    divergence D and the loss L to choose; all else is as in PVI, which it is with
    `data_loss = "log"` and `divergence = "kl"`. The server multiplies factors, which is the
    paper's server with KL.
    """

    name = "fedgvi"
    about = About(
        "PVI with losses that are robust to wrong labels and outliers",
        "Mildner et al. 2025",
        needs=(_loss_of_likelihood,),
    )

    data_loss: Annotated[Literal["log", "gce", "beta"], Chosen()] = Field(
        "gce",
        description="loss of a sample: log, the negative log-likelihood; gce, generalized "
        "cross-entropy (classes); beta, the density-power loss (classes, labels, Gaussian noise)",
    )
    delta: Annotated[float, Only("data_loss", "gce"), Tuned(0.05, 1)] = Field(
        0.8,
        gt=0,
        le=1,
        description="δ of the generalized cross-entropy. Near 0: log. 1: the absolute error of "
        "the probability",
    )
    beta: Annotated[float, Only("data_loss", "beta")] = Field(
        1.5, gt=1, le=4, description="β of the density-power loss. Near 1: log"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """The most robust loss that the likelihood has: log where it has no other, or where
        training weighs classes. Larger changes (damping) do not help it.
        """
        likelihood = known.run.likelihood
        if known.run.training.reweights:
            loss = "log"
        elif likelihood.target.classes:
            loss = "gce"
        else:
            loss = "beta" if has_density_power(likelihood) else "log"
        return {**super().recommended(known), "method.damping": None, "method.data_loss": loss}

    def fit(self, run: Federation) -> Fit:
        """The mean loss L of samples."""
        likelihood = run.likelihood
        match self.data_loss:
            case "log":
                return likelihood.nll
            case "gce":
                return lambda f, y: generalized_cross_entropy(likelihood, f, y, self.delta).mean()
            case "beta":
                return lambda f, y: density_power(likelihood, f, y, self.beta).mean()
