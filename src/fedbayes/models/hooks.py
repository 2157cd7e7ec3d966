"""Functions that are called with what layers of a network get and give."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

Hook = Callable[[str, nn.Module, tuple[Any, ...], Tensor], Tensor | None]
"""Called with a layer's name, the layer, its inputs and outputs; gives others, or None."""


@contextmanager
def watched(layers: Mapping[str, nn.Module], hook: Hook) -> Iterator[None]:
    """Call a function whenever one of these layers has computed."""
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(hook, name)))
        yield
