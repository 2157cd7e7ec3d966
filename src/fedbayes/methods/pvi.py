"""PVI: partitioned variational inference with mean-field Gaussians, over any network."""

from fedbayes.contracts import About
from fedbayes.contracts.mean_field import MeanField


class Pvi(MeanField):
    """All clients share one network; its posterior s(θ) = Π_i s_i(θ) is a product of factors,
    each with its share p(θ)^(1/K) of the prior.

    A client minimizes the free energy (Ashman et al. 2022, Algorithm 1)

        KL(s_new ‖ s/s_i · p(θ)^(1/K)) − E_{θ ~ s_new}[log p(D_i | θ)],   s_new = s_i,new · s/s_i,

    and sends the change of its factor's natural parameters. One client after another
    (`clients_per_round = 1`, `sampling = "cyclic"`) is sequential PVI; several are synchronous,
    damped by their number. It is VIRTUAL without clients' own networks, of any network: weights
    are drawn as they are, whatever the layers that use them. Frozen weights are no random
    variables: with adapters, or a head on a frozen body, the posterior is of what trains.
    """

    name = "pvi"
    about = About(
        "one posterior, the product of the clients' Gaussian factors",
        "Bui et al. 2018; Ashman et al. 2022",
    )
