"""A network's forward pass, operation by operation, as `torch.export` recorded it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.models.operations import tensor_names
from fedbayes.models.units import Groups, evaluating, exported, program_units

_PASSING = ("alias", "clone", "contiguous", "detach", "dropout", "feature_dropout", "to")
"""Operations that hand on what they get, in evaluation mode."""


@dataclass(frozen=True)
class GraphStep:
    """An operation that was just carried out."""

    node: Node
    arguments: Mapping[str, Any]
    """By the name that the operation has for them."""
    value: Any


class Steps:
    """The operations of a network, from inputs to outputs.

    Args:
        module: the network; it is left in evaluation mode.
        example: a batch of at least two samples; all batches have its size.
        name: of the network, for errors.

    Raises:
        ModelError: it cannot be recorded, has not one output, or operations of its own inside an
            operation, as a loop has.
    """

    def __init__(self, module: nn.Module, example: Tensor, name: str = "the network") -> None:
        try:
            self._program = exported(module, example)
        except Exception as error:  # whatever a module of somebody's own may raise
            line = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ModelError(f"{name} cannot be traced by torch.export: {line}") from None
        if any(n.op == "get_attr" and n.users for n in self._program.graph.nodes):
            raise ModelError(
                f"{name} has nested operations, such as loops or branches. Choose another network "
                "for the fused one with --like or --model"
            )
        self.shape = tuple(example.shape)
        signature = self._program.graph_signature
        named = {
            **tensor_names(self._program),
            **signature.inputs_to_lifted_tensor_constants,
        }
        nodes = list(self._program.graph.nodes)
        self.nodes: list[Node] = [n for n in nodes if n.op == "call_function"]
        """Operations in their order."""
        placeholders = [n for n in nodes if n.op == "placeholder"]
        self.names: dict[Node, str] = {
            n: named[n.name] for n in placeholders if n.name in named and n.users
        }
        """Of tensors that the module holds and operations get."""
        inputs = [n for n in placeholders if n.name in signature.user_inputs]
        outputs = next(n for n in nodes if n.op == "output").args[0]
        if len(inputs) != 1 or len(outputs) != 1:
            raise ModelError(
                f"{name} has {len(inputs)} inputs and {len(outputs)} outputs, but one of each is "
                "needed"
            )
        self.input, self.output = inputs[0], outputs[0]
        self._constants: Tensors = {
            n: c for n, c in self._program.constants.items() if isinstance(c, Tensor)
        }
        last = {used: node for node in nodes for used in node.all_input_nodes}
        self._done: dict[Node, list[Node]] = {}
        for used, node in last.items():
            self._done.setdefault(node, []).append(used)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        parameters = set(signature.inputs_to_parameters.values())
        learnt = {node for node, name in self.names.items() if name in parameters}
        behind = self._behind(learnt)
        self.first: frozenset[str] = frozenset(
            name
            for node in self.nodes
            if behind.isdisjoint(set(node.all_input_nodes) - learnt)
            for name in [self.names[n] for n in node.all_input_nodes if n in learnt][-1:]
        )
        """A parameter of each operation before which there is none: all else depends on them."""

    def units(self) -> Groups:
        """The network's groups of units."""
        return program_units(self._program)

    def run(self, tensors: Tensors, x: Tensor) -> Iterator[GraphStep]:
        """One forward pass, operation by operation.

        Args:
            tensors: parameters and buffers by name.
            x: a batch of inputs.
        """
        values = self.begun(x)
        for node in self.nodes:
            yield self.carried_out(node, tensors, values)
            self._forget(node, values)

    def begun(self, x: Tensor) -> dict[Node, Any]:
        """The values that a forward pass begins with: the inputs, images channels last.

        Raises:
            ModelError: a batch of another size.
        """
        if tuple(x.shape) != self.shape:
            raise ModelError(
                f"a batch of inputs has shape {tuple(x.shape)}, but the first has {self.shape}. "
                "Use batches of one size"
            )
        if x.ndim == 4 and not self._bound_to_layout:
            x = x.contiguous(memory_format=torch.channels_last)
        return {self.input: x}

    def carried_out(self, node: Node, tensors: Tensors, values: dict[Node, Any]) -> GraphStep:
        """One operation, whose result is put next to the values that it has to do with."""

        def value(of: Node) -> Any:
            name = self.names.get(of)
            if name is None:
                return values[of]
            return tensors[name] if name in tensors else self._constants[name]

        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return GraphStep(node, _by_name(node, args, kwargs), values[node])

    def _forget(self, node: Node, values: dict[Node, Any]) -> None:
        """Leave out what no operation after this one asks for."""
        for used in self._done.get(node, ()):
            values.pop(used, None)

    @cached_property
    def _bound_to_layout(self) -> bool:
        """Whether an operation asks how tensors lie in memory."""
        return any(kind(node).startswith(("view", "as_strided", "set")) for node in self.nodes)

    def outputs(self, tensors: Tensors, x: Tensor) -> Tensor:
        """The outputs of the network for a batch."""
        found = x
        for step in self.run(tensors, x):
            if step.node is self.output:
                found = step.value
        return found

    def tensor(self, node: Node, argument: str) -> str | None:
        """Name of the parameter or buffer that an operation gets as an argument, if it is one."""
        given = self.argument(node, argument)
        return self.names.get(given) if isinstance(given, Node) else None

    def argument(self, node: Node, argument: str) -> Any:
        """An argument of an operation, by its name."""
        return _by_name(node, node.args, node.kwargs).get(argument)

    @cached_property
    def depends(self) -> set[Node]:
        """Operations on whose results some tensor of the module has an influence."""
        return self._behind(set(self.names))

    def _behind(self, tensors: set[Node]) -> set[Node]:
        """These tensors, and operations on whose results they have an influence."""
        found = set(tensors)
        for node in self.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def sole_reader(self, node: Node) -> Node | None:
        """The one operation that reads a value, whatever hands it on; None: several, or none."""
        while True:
            users = list(node.users)
            if len(users) != 1:
                return None
            if kind(users[0]) not in _PASSING:
                return users[0]
            node = users[0]

    def read_before(self, node: Node, *names: str | None) -> bool:
        """Whether an earlier operation reads one of these tensors."""
        return any(
            self.place.get(user, len(self.nodes)) < self.place[node]
            for held, name in self.names.items()
            if name in names
            for user in held.users
        )

    def handed_on(self, node: Node) -> Node:
        """What stands behind a value that was handed on."""
        while kind(node) in _PASSING and isinstance(node.args[0], Node):
            node = node.args[0]
        return node

    def alike(self, other: "Steps") -> bool:
        """Whether another network computes the same of other weights, maybe of other widths."""
        if len(self.nodes) != len(other.nodes):
            return False
        return all(
            one.target == two.target
            and [self.names.get(n) for n in one.all_input_nodes]
            == [other.names.get(n) for n in two.all_input_nodes]
            and (not _rigid(one) or _plain(one) == _plain(two))
            for one, two in zip(self.nodes, other.nodes, strict=True)
        )


class Pass:
    """A forward pass that stops at an operation, and resumes the weights of then."""

    def __init__(self, steps: Steps, x: Tensor) -> None:
        self._steps, self._next = steps, 0
        self._values = steps.begun(x)

    def at(self, node: Node, tensors: Tensors) -> GraphStep:
        """An operation as it is with these weights; the next call may carry it out again.

        Args:
            node: no earlier one than in the last call; it changes nothing in place.
            tensors: parameters and buffers by name.
        """
        steps, end = self._steps, self._steps.place[node]
        for past in steps.nodes[self._next : end]:
            steps.carried_out(past, tensors, self._values)
            steps._forget(past, self._values)
        self._next = end
        return steps.carried_out(node, tensors, self._values)

    def value(self, node: Node, tensors: Tensors) -> Any:
        """What an earlier operation gave, or a tensor of the network."""
        name = self._steps.names.get(node)
        return self._values[node] if name is None else tensors[name]

    @property
    def nbytes(self) -> int:
        """Of all values that are still wanted."""
        return sum(v.nbytes for v in self._values.values() if isinstance(v, Tensor))


def kind(node: Node) -> str:
    """Of an operation: its name, without its overload and the mark of changes in place."""
    packet = getattr(node.target, "overloadpacket", None)
    name: str = getattr(packet, "__name__", str(node.target))
    return name.removesuffix("_") if not name.startswith("_") else name


def _rigid(node: Node) -> bool:
    """Whether constants among an operation's arguments do not depend on widths."""
    return "conv" in kind(node) or "pool" in kind(node)


def _plain(node: Node) -> list[Any]:
    """An operation's constants, but how many channels are convolved each on its own."""
    given = _by_name(node, node.args, node.kwargs)
    if "groups" in given:
        channel = 1 - given["weight"].meta["val"].ndim
        if given["groups"] == given["input"].meta["val"].shape[channel]:
            del given["groups"]
    return [v for v in given.values() if not isinstance(v, Node)]


def _by_name(node: Node, args: Any, kwargs: Any) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(index): value for index, value in enumerate(args)}
    found = {}
    for index, argument in enumerate(schema.arguments):
        value = kwargs.get(argument.name, argument.default_value)
        found[argument.name] = args[index] if index < len(args) else value
    return found


def clean(module: nn.Module) -> Tensors:
    """A module's parameters and buffers by name, each once though shared, without gradients."""
    both = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in both}


def stored(module: nn.Module) -> Tensors:
    """What a module's `state_dict` has, each tensor once though shared."""
    kept = module.state_dict().keys()
    return {name: tensor for name, tensor in clean(module).items() if name in kept}


def module_size(module: nn.Module) -> int:
    """Scalars of a module's parameters, shared ones once; buffers do not count."""
    return sum(parameter.numel() for parameter in module.parameters())


def require_finite(module: nn.Module, name: str) -> None:
    """See that no weight of a network is NaN or infinite, and no buffer NaN.

    Raises:
        ModelError: one is.
    """
    learnt = dict(module.named_parameters())
    for key, tensor in clean(module).items():
        odd = ~torch.isfinite(tensor) if key in learnt else torch.isnan(tensor)
        if bool(odd.any()):  # masks of attention are infinite
            raise ModelError(f"the weights {key!r} of {name} are not all finite")


def same_function(steps: Steps, module: nn.Module, x: Tensor) -> bool:
    """Whether a module of the same shapes is the network that was recorded, with other weights."""
    try:
        with torch.no_grad():
            answer, wanted = steps.outputs(clean(module), x), evaluating(module)(x)
    except Exception:  # whatever a module of somebody's own may raise
        return False
    return answer.shape == wanted.shape and torch.allclose(answer, wanted, rtol=1e-4, atol=1e-4)
