"""What several methods need of a run, and tell of it, for `About`."""

from fedbayes.contracts.method import AnyMethod, Need
from fedbayes.contracts.run import Federation
from fedbayes.errors import ConfigError, ModelError


def where(setting: str, *values: object, need: Need) -> Need:
    """A need of the method only where its setting has one of these values."""

    def only(method: AnyMethod, run: Federation) -> None:
        if getattr(method, setting) in values:
            need(method, run)

    return only


def weights_alone(method: AnyMethod, run: Federation) -> None:
    """Nothing but trained weights changes in training: they can be random, mixed and adapted.

    Raises:
        ModelError: the network has buffers, such as running means.
        ConfigError: it is to compute in bf16.
    """
    if run.network.precision != "float32":
        raise ConfigError(f"{method.name} computes in float32. Leave precision out")
    if fixed := sorted(run.network.buffers):
        raise ModelError(
            f"{method.name} needs a network that gradients train completely, but not "
            f"{', '.join(fixed)}. Set model.batch_norm = 'frozen', or choose a network without "
            "running statistics"
        )


def own_prior(method: AnyMethod, run: Federation) -> None:
    """The prior is all that draws the trained parameters.

    Raises:
        ConfigError: training has weight decay, which would draw the logarithms of stds and
            precisions to 0 as well.
    """
    if run.training.weight_decay:
        raise ConfigError(
            f"{method.name} has its own prior, and training.weight_decay would add another. Set "
            "training.weight_decay = 0"
        )


def all_steps(method: AnyMethod, run: Federation) -> None:
    """Samples are from all steps of training.

    Raises:
        ConfigError: training ends by patience.
    """
    if run.training.patience is not None:
        raise ConfigError(
            f"{method.name} needs samples from all steps of a client's training. Leave "
            "training.patience out"
        )


def langevin(method: AnyMethod, run: Federation) -> None:
    """Steps of training are such as Langevin noise makes a sampler of.

    Raises:
        ConfigError: it is not plain SGD over all steps.
    """
    training = run.training
    if training.optimizer != "sgd" or training.momentum or training.weight_decay:
        raise ConfigError(
            "Langevin dynamics needs training.optimizer = 'sgd' with momentum and weight_decay 0"
        )
    all_steps(method, run)


def sgd_steps(method: AnyMethod, run: Federation) -> None:
    """Steps of training are those of SGD, whose factors are known.

    Raises:
        ConfigError: the optimizer is another one.
    """
    if run.training.optimizer != "sgd":
        raise ConfigError(
            f"{method.name} needs steps of SGD, got training.optimizer = "
            f"{run.training.optimizer!r}. Set training.optimizer = 'sgd'"
        )


def sum_of_gradients(method: AnyMethod, run: Federation) -> None:
    """The path of training is a sum of gradients.

    Raises:
        ConfigError: the optimizer is not SGD without momentum.
    """
    if run.training.optimizer != "sgd" or run.training.momentum:
        raise ConfigError(
            "control variates along the path need training.optimizer = 'sgd' with momentum 0; "
            "variates from gradients (method.control = 'gradient', if the method has it) do not"
        )


def of_first_round(method: AnyMethod, run: Federation) -> list[str]:
    """Whether all clients are in the ensemble of the first round."""
    if run.cohort == run.clients:
        return []
    return [
        f"the ensemble of {method.name} contains only the networks of the {run.cohort} clients of "
        "round 1. Leave clients_per_round out"
    ]
