"""Networks as functions, in evaluation mode and without gradients of weights."""

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedbayes.models.layout import by_portions
from fedbayes.models.steps import require_finite

Function = Callable[[Tensor], Tensor]
"""From inputs [n, ...] to outputs [n, K], in evaluation mode; without gradients of weights."""


def frozen(module: nn.Module, name: str = "the network") -> Function:
    """A module as a function: a twin in evaluation mode that shares its memory, without gradients
    of weights. Images go through it channels last, which is twice as fast, if its code bears that.

    Raises:
        ModelError: a weight is not finite.
    """
    require_finite(module, name)
    own: dict[int, object] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        is_parameter = isinstance(tensor, nn.Parameter)
        plain = tensor.detach()
        own[id(tensor)] = nn.Parameter(plain, requires_grad=False) if is_parameter else plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what programs are made of
        twin = copy.deepcopy(module, own)
    set_training(twin, False)
    return ChannelsLast(twin)


class ChannelsLast:
    """A module that gets its images channels last, as long as its code bears it: `view` does not.
    With convolutions it predicts some of them at a time.

    Args:
        module: from inputs [n, ...] to outputs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._laid_out = module, True
        self._convolves = any(isinstance(layer, nn.Conv2d) for layer in module.modules())

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs at inputs."""
        predicts = not (self.module.training or torch.is_grad_enabled())
        if predicts and self._convolves and x.ndim == 4:
            return by_portions(self.at_once, x)
        return self.at_once(x)

    def at_once(self, x: Tensor) -> Tensor:
        """The same of all inputs together, as layers want them that look at a whole batch."""
        if x.ndim == 4 and self._laid_out:
            try:
                outputs: Tensor = self.module(x.contiguous(memory_format=torch.channels_last))
                return outputs
            except RuntimeError as error:
                if "view size is not compatible" not in str(error):
                    raise
                self._laid_out = False
        outputs = self.module(x)
        return outputs


def set_training(module: nn.Module, training: bool) -> None:
    """Training or evaluation mode of batch normalization. All else stays in evaluation mode,
    dropout and what a network's own code does in training alone (auxiliary outputs, say); but
    recurrent layers on a GPU, which has their gradients in training mode only. Exported programs,
    which know no other mode, stay as they are.
    """
    try:
        module.eval()
    except NotImplementedError:
        return
    for layer in module.modules():
        recurrent = isinstance(layer, nn.RNNBase) and any(p.is_cuda for p in layer.parameters())
        if recurrent or isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train(training)
