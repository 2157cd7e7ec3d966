"""What methods share whose server asks networks about inputs that it draws, round after round."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from fedbayes.contracts import Federation, Info, RoundContext
from fedbayes.core import seeds
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError, told_as
from fedbayes.fusion.combining import combine
from fedbayes.fusion.distillation import distill
from fedbayes.fusion.draws import CachedInputs, Draws
from fedbayes.fusion.frozen import Function
from fedbayes.fusion.settings import DistillationSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.inputs import InputPrior, Inputs, build_prior
from fedbayes.models.resize import with_weights


def drawable(method: Any, run: Federation) -> None:
    """Networks can predict single inputs, and inputs of the method can be drawn, if it draws any.

    Raises:
        ConfigError: they cannot.
    """
    if method.inputs is None:
        return
    if run.likelihood.coupled:
        raise ConfigError(
            f"{method.name} needs predictions of single inputs, but the likelihood "
            f"{run.likelihood.name} has no distribution. Choose another method"
        )
    if run.preprocessing.permuted:
        raise ConfigError(
            f"{method.name} evaluates all clients' networks on the same inputs, but with permuted "
            "pixels each client has its own order. Choose other data, or another method"
        )
    with told_as(ConfigError, "method.inputs", ConfigError):
        input_prior(method.inputs, run)


def input_prior(inputs: str, run: Federation) -> InputPrior:
    """The input prior."""
    seen = run.preprocessing
    return build_prior(inputs, seen.shape, features=seen.features, columns=seen.columns)


def input_remarks(method: Any, run: Federation) -> list[str]:
    """What a user should know of the method's inputs before the first round, if there are any."""
    if method.inputs is None:
        return []
    prior = input_prior(method.inputs, run)
    return [*prior.notes, f"{method.name} assumes these inputs: {prior.assumes}"]


def draws_of_round(inputs: str, at: RoundContext, cycle: int = 0) -> Draws:
    """The inputs of a round in the form that networks expect, on their device, cached.

    Args:
        inputs: what is drawn, as a setting names it.
        at: the round.
        cycle: of several in a round, each of which has inputs of its own.
    """
    seed = seeds.integer(at.run.seed, "inputs", round=at.round, client=cycle)
    drawn = Inputs.seen(input_prior(inputs, at.run), at.run.preprocessing, seed)
    return CachedInputs(drawn, device=at.run.network.device)


def module_with(weights: Tensors, run: Federation) -> nn.Module:
    """The run's network with these weights, what is frozen frozen."""
    module = with_weights(run.network.module, run.network.whole(weights))
    for name, parameter in module.named_parameters():
        if name in run.network.constants:
            parameter.requires_grad_(False)
    return module.to(run.network.device)


def weights_in(module: nn.Module, run: Federation) -> Tensors:
    """The weights of a module that the run's clients share, on the CPU."""
    state = module.state_dict()
    return {name: state[name].cpu() for name in run.network.initial}


def ensemble_of(networks: Sequence[Tensors], run: Federation) -> Teacher:
    """What an ensemble of networks with these weights predicts on average."""
    return Teacher([_function(weights, run) for weights in networks], None, run.likelihood)


def learnt(
    teacher: Teacher,
    start: Tensors,
    inputs: str,
    settings: DistillationSettings,
    at: RoundContext,
    cycles: int = 1,
) -> tuple[Tensors, Info]:
    """A network that learns what a teacher predicts.

    Args:
        teacher: the joint prediction of networks.
        start: weights to start from.
        inputs: what is drawn, as a setting names it.
        settings: of one cycle of the learning rate.
        at: the round.
        cycles: number of cycles, run sequentially; the result is the mean of the networks at their
            ends (stochastic weight averaging).

    Returns:
        The weights, and the divergence from the teacher in nats of the start and of the last
        cycle's end on held-out inputs.
    """
    module, ends, told = module_with(start, at.run), list[Tensors](), Info()
    for cycle in range(cycles):
        found = distill(module, teacher, draws_of_round(inputs, at, cycle), settings)
        module = found.module
        ends.append(weights_in(module, at.run))
        told.setdefault("divergence_of_start", found.checks[0].divergence)
        told["divergence"] = found.divergence
    return combine(ends, [1 / cycles] * cycles), told


def _function(weights: Tensors, run: Federation) -> Function:
    """A network as a function of its inputs alone."""
    ready = run.network.prepare(weights)
    return lambda x: run.network(ready, x)
