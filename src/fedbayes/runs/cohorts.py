"""Who takes part in a round."""

from fedbayes.contracts import Run
from fedbayes.federation.privacy.noise import Secret
from fedbayes.federation.privacy.sampling import poisson_cohort
from fedbayes.federation.round import sample_cohort
from fedbayes.runs.config import Config


def cohort_of(config: Config, run: Run, secret: Secret | None, number: int) -> list[int]:
    """The clients of a round, by rising index.

    Args:
        config: the settings.
        run: what no round changes.
        secret: of the run, if it needs one.
        number: the round, from 1.
    """
    if secret is not None and config.sampling == "poisson":
        return poisson_cohort(secret, number, run.clients, run.cohort / run.clients)
    cyclic = config.sampling == "cyclic"
    return sample_cohort(config.seed, number, run.clients, run.cohort, cyclic=cyclic)
