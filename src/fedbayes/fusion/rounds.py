"""What methods share whose server asks networks about inputs that it draws, round after round."""

from torch import nn

from fedbayes import seeds
from fedbayes.contracts import At, Run
from fedbayes.errors import ConfigError
from fedbayes.fusion.draws import Draws, Kept
from fedbayes.inputs import InputPrior, Inputs, build_prior
from fedbayes.models.resize import with_weights
from fedbayes.tensors import Tensors


def check_inputs(name: str, inputs: str, run: Run) -> InputPrior:
    """See that networks can be asked about single inputs, and that such can be drawn.

    Args:
        name: of the method.
        inputs: what inputs are drawn, as a setting names it.
        run: the run.

    Raises:
        ConfigError: they cannot.
    """
    if run.likelihood.coupled:
        raise ConfigError(
            f"{name} asks networks what they predict of single inputs, and the likelihood "
            f"{run.likelihood.name} has no distribution of them; choose another method"
        )
    if run.preprocessing.permuted:
        raise ConfigError(
            f"{name} asks all clients' networks about the same inputs, and with permuted "
            "pixels each client has an order of its own; choose other data, or another method"
        )
    return input_prior(inputs, run)


def input_prior(inputs: str, run: Run) -> InputPrior:
    """What inputs are taken for."""
    seen = run.preprocessing
    return build_prior(inputs, seen.shape, features=seen.features, columns=seen.columns)


def input_remarks(name: str, inputs: str, run: Run) -> list[str]:
    """What a user should know of the inputs before the first round."""
    prior = input_prior(inputs, run)
    return [*prior.notes, f"{name} assumes of inputs: {prior.assumes}"]


def draws_of_round(inputs: str, at: At) -> Draws:
    """The inputs of a round, as networks see them, kept for whoever asks again."""
    seed = seeds.integer(at.run.seed, "inputs", round=at.round)
    return Kept(Inputs.seen(input_prior(inputs, at.run), at.run.preprocessing, seed))


def module_with(weights: Tensors, run: Run) -> nn.Module:
    """The run's network with these weights, what is frozen frozen."""
    module = with_weights(run.network.module, run.network.whole(weights))
    for name in run.network.constants:
        module.get_parameter(name).requires_grad_(False)
    return module.to(run.network.device)


def weights_in(module: nn.Module, run: Run) -> Tensors:
    """The weights of a module that the run's clients share, on the CPU."""
    state = module.state_dict()
    return {name: state[name].cpu() for name in run.network.initial}
