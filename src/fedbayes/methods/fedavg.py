"""FedAvg: the Gaussian prior of vanishing precision."""

from fedbayes.contracts import About, PointEstimate, Weights


class FedAvg(PointEstimate[Weights]):
    """Federated averaging.

    Hard EM on p(φ_s | w) = N(w, 1/λ) with λ → 0: clients train from w as if alone, and
    w = Σ n_s φ_s / Σ n_s (EM paper, Eq. 11).
    """

    name = "fedavg"
    about = About(
        "weighted mean of the clients' weights",
        "McMahan et al. 2017; EM view: Louizos et al. 2021, section 2.1",
    )
    server_state = Weights
