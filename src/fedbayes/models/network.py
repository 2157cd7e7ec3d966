"""A network as a pure function of its weights."""

from collections import Counter
from collections.abc import Collection, Sequence
from copy import deepcopy
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor, nn

from fedbayes.core.brief import Brief
from fedbayes.core.devices import nondeterministic, out_of_memory
from fedbayes.core.lazy import raised
from fedbayes.core.tensors import Tensors
from fedbayes.errors import FedbayesError, ModelError, NetworkError
from fedbayes.models import networks
from fedbayes.models.layout import (
    by_portions,
    channels_last,
    filters_last,
    gradient_channels_last,
)
from fedbayes.models.normalization import frozen_buffers
from fedbayes.models.resize import channels_by_weight, is_depthwise
from fedbayes.models.settings import Precision
from fedbayes.models.units import (
    Entries,
    Group,
    Groups,
    find_units,
    mask,
    masks,
    slice,
    trained_groups,
    zero,
)


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _here(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


_STILL = frozenset(
    [
        *(nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.Conv1d, nn.Conv2d),
        *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus),
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm),
    ]
)
"""Layers that draw no random numbers."""


def digest_of(tensors: Tensors) -> str:
    """SHA-256 of names, types, shapes and values of tensors, hexadecimal; empty without any."""
    if not tensors:
        return ""
    digest = sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Network(Brief):
    """A module seen as `logits = network(weights, x)`.

    Each call binds the given tensors to the module and leaves the module as it was, by a table made
    once: that saves the bookkeeping of `torch.func.functional_call` on every step. Calls can be
    differentiated and mapped by `torch.func`. Layers whose output follows from their weights
    (linear, convolution) accept weights of other widths than the module was built with, so one
    network serves models of any width.

    What no training changes is no weight of it: parameters without `requires_grad`, buffers that
    are not persistent, those that a training pass does not write to (`fixed`), and those of
    normalizations whose statistics are frozen. They stay in the module and are not sent; whoever
    builds the network from the same settings has the same ones, which their digest shows.

    Examples:
        >>> import torch
        >>> from fedbayes.models import Network
        >>> network = Network(torch.nn.Linear(3, 2))
        >>> network(network.initial, torch.zeros(5, 3)).shape
        torch.Size([5, 2])
        >>> sorted(network.initial)
        ['bias', 'weight']
    """

    def _shows(self) -> dict[str, object]:
        return {
            "module": type(self.module).__name__,
            "shape": self.shape,
            "weights": len(self.initial),
            "parameters": sum(tensor.numel() for tensor in self.initial.values()),
            "device": str(self.device),
        }

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
        shape: tuple[int, ...] | None = None,
        own: frozenset[str] = frozenset(),
        fixed: frozenset[str] = frozenset(),
        name: str = "",
    ) -> None:
        """Take a module over.

        Args:
            module: maps inputs [n, ...] to logits.
            device: where it computes.
            precision: of its computations.
            shape: of a sample; wanted where somebody asks for `groups`.
            own: names of tensors that are each client's own.
            fixed: names of persistent buffers that no training pass writes to.
            name: `package.module:factory` of a user's own network, for errors.
        """
        self.shape = shape
        self._name = name
        try:
            self.module = module.to(device)
        except torch.OutOfMemoryError:
            raise ModelError(
                f"{device} has no memory left for a network of "
                f"{sum(p.numel() for p in module.parameters()):,} parameters. End other processes "
                "on it, choose another device, or use a smaller model"
            ) from None
        self.device = torch.device(device)
        self.precision = precision
        stored = module.state_dict().keys()
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        kept = fixed | frozen_buffers(module)
        buffers = {n: b for n, b in module.named_buffers() if n in stored and n not in kept}
        changed = {**trained, **buffers}
        shared = {n: t for n, t in changed.items() if n not in own}
        # A user's code may write to its module, or give out the same one twice.
        self.initial: Tensors = _copies(shared) if name else _here(shared)
        """Weights at the start: all that a client's training may change, and everybody shares.
        On the CPU, those of a built-in network share memory with the module."""
        self.own: Tensors = _copies({n: t for n, t in changed.items() if n in own})
        """Weights at the start that are each client's own: they never leave it."""
        self.buffers = frozenset(buffers)
        """Names of those that no gradient trains, such as running means."""
        self.constants: Tensors = _here(
            {
                n: tensor
                for n, tensor in (*module.named_parameters(), *module.named_buffers())
                if n in kept or (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
            }
        )
        """What does not train: parameters whose `requires_grad` is False, buffers that nothing
        changes. Never sent; they share memory with the module."""
        self.fixed: Tensors = {n: t for n, t in self.constants.items() if n in fixed}
        """Buffers that no training pass writes to. They are stored with a model, as a `state_dict`
        holds them."""
        self._written = self._versions()
        types = [w.dtype for w in changed.values() if w.is_floating_point()]
        self.dtype = types[0] if types else torch.float32
        """Type of the weights."""
        self._slots = self._find_slots()
        self._depthwise = [(m, m.groups) for m in module.modules() if is_depthwise(m)]
        self._lay_out(any(isinstance(m, nn.Conv2d) for m in module.modules()))

    def _lay_out(self, channels_last: bool) -> None:
        """Lay images and filters out channels last, if the module's code bears it."""
        self._channels_last = channels_last
        pools = [m for m in self.module.modules() if type(m) is nn.MaxPool2d]
        self._pools = [p for p in pools if channels_last and not p.return_indices]
        for name, parameter in self.module.named_parameters():
            if name in self.constants and parameter.ndim == 4:
                layout = torch.channels_last if channels_last else torch.contiguous_format
                parameter.data = parameter.data.to(memory_format=layout)
        if channels_last and self.shape is not None and len(self.shape) == 3:
            x = self._samples(torch.zeros(2, *self.shape))
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    self(self.prepare(self.initial), x)
            except RuntimeError as error:
                if "view size is not compatible" in str(error):
                    self._lay_out(False)
            except Exception:  # whatever else a module may raise, it raises where it is used
                return

    def _find_slots(self) -> list[tuple[dict[str, Tensor | None], str, str, Tensor]]:
        """Where each tensor lives: the owner's table, its key, the name in `weights`, itself."""
        names: dict[int, str] = {}
        slots: list[tuple[dict[str, Tensor | None], str, str, Tensor]] = []
        for prefix, owner in self.module.named_modules():
            for table in (owner._parameters, owner._buffers):
                for key, tensor in table.items():
                    if tensor is None:
                        continue
                    own = f"{prefix}.{key}" if prefix else key
                    name = names.setdefault(id(tensor), own)
                    if name in self.initial or name in self.own:
                        slots.append((table, key, name, tensor))
        return slots

    @cached_property
    def traced(self) -> Groups:
        """Groups of units of the weights that are trained, and what belongs to none.

        Raises:
            ModelError: the network was made without the shape of a sample.
        """
        if self.shape is None:
            raise ModelError("tracing the units of a network needs a sample. Give its shape")
        weights = self.prepare(self.initial)
        bound = {n: w if n in self.buffers else nn.Parameter(w) for n, w in weights.items()}
        try:
            self._bind(bound)
            found = find_units(self.module, self._samples(torch.zeros(2, *self.shape)))
        finally:
            self._unbind()
        return trained_groups(found, self.initial.keys() - self.buffers)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of units, inputs to outputs."""
        return self.traced.groups

    @cached_property
    def entries(self) -> tuple[Entries, ...]:
        """Trained weights of two axes or more, entry by entry; biases and scales are none."""
        outputs = {name for group in self.groups if group.output for name in group.producers}
        return tuple(
            Entries(name, tuple(tensor.shape), name in outputs)
            for name, tensor in self.split()[0].items()
            if tensor.ndim > 1
        )

    @cached_property
    def narrowing(self) -> tuple[Group, ...]:
        """Groups from which units can be sliced out, and the module still computes.

        The code of a module may count on its widths, so each is tried. A group normalization
        over several groups would put what is left of one into cells of another: they stay whole.
        """
        norms = Counter(norm for group in self.groups for norm in group.norms)
        able = [g for g in self.groups if g.sliceable and all(norms[n] == 1 for n in g.norms)]
        if self._computes_without(able):
            return tuple(able)
        return tuple(group for group in able if self._computes_without([group]))

    def _computes_without(self, groups: Sequence[Group]) -> bool:
        """Whether the module computes the same without units as with zeros in their place."""
        # Group normalization counts its channels, so there it is enough that it computes.
        assert self.shape is not None
        alive = {group.layer: group.thinned(1) for group in groups if group.step > 1}
        found = masks(groups, alive, running=True)
        rng = torch.Generator().manual_seed(0)
        x = self._samples(torch.randn(2, *self.shape, generator=rng))
        whole = self.prepare(zero(self.initial, masks(groups, alive)))
        small = self.prepare(slice(mask(self.initial, found)))
        with torch.no_grad(), torch.random.fork_rng():
            wanted = self(whole, x)
            try:
                answer = self(small, x)
                self({name: w.clone() for name, w in small.items()}, x, training=True)
            except Exception:  # whatever a module of somebody's own may raise
                return False
        if answer.shape != wanted.shape:
            return False
        counted = any(group.norms for group in groups)
        return counted or torch.allclose(answer, wanted, rtol=1e-3, atol=1e-3)

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """Names of the tensors of each layer, inputs to outputs, by the name of its module.

        A layer begins with a module that has a weight of two or more axes. What has only vectors,
        such as a normalization or a learned noise, belongs to the layer before it. The order is
        that of a forward pass, or of the code where nobody gave the shape of a sample.
        """
        modules: dict[str, list[str]] = {}
        for name in self.initial:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        found: dict[str, list[str]] = {}
        for module in sorted(modules, key=[*self._called(modules), *modules].index):
            names = modules[module]
            if not found or any(self.initial[name].ndim > 1 for name in names):
                found[module] = []
            found[next(reversed(found))].extend(names)
        return found

    def _called(self, names: Collection[str]) -> list[str]:
        """Modules in the order in which a forward pass calls them."""
        if self.shape is None:
            return []
        order: list[str] = []
        hooks = [
            self.module.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, name=name: order.append(name)
            )
            for name in names
        ]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self(self.prepare(self.initial), self._samples(torch.zeros(2, *self.shape)))
        finally:
            for hook in hooks:
                hook.remove()
        return order

    def split(self) -> tuple[Tensors, Tensors]:
        """The initial tensors: those that gradients train, and the others (running means, say)."""
        trained = {name: t for name, t in self.initial.items() if name not in self.buffers}
        return trained, {name: t for name, t in self.initial.items() if name in self.buffers}

    def adopt(self, model: Tensors) -> None:
        """Take the frozen tensors of a whole model instead of the network's own, in place."""
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name in self.constants.keys() & model.keys():
            self.constants[name] = model[name].detach().to("cpu", copy=True)
            own[name].data = self.prepare({name: model[name].detach().clone()})[name]
        self.fixed = {name: self.constants[name] for name in self.fixed}
        self._written = self._versions()
        self.__dict__.pop("constants_digest", None)

    @cached_property
    def constants_digest(self) -> str:
        """SHA-256 of names and values of the frozen parameters, hexadecimal; empty without any.

        Server and clients that have another one have not built the same network.
        """
        return digest_of(self.constants)

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Of each buffer among the constants, which tensor it is and how often it was written."""
        return {
            n: (id(b), b._version) for n, b in self.module.named_buffers() if n in self.constants
        }

    def require_unwritten(self) -> None:
        """Check that training wrote to no buffer that is treated as a constant.

        Raises:
            ModelError: it did, though not in the pass that was tried before the first round.
        """
        now = self._versions()
        changed = [name for name, version in self._written.items() if now.get(name) != version]
        if changed:
            raise ModelError(
                f"training wrote to the buffer {changed[0]!r} of the network, but the first "
                "training pass did not, so it is not sent. Write to it in every training pass, "
                f"for example with self.{changed[0]}.add_(0)"
            )

    @cached_property
    def draws(self) -> bool:
        """Whether its layers may draw random numbers in training: all that are not known to draw
        none, and layers with hooks.
        """
        return any(
            (type(layer) not in _STILL and type(layer).__module__ != networks.__name__)
            or layer._forward_hooks
            or layer._forward_pre_hooks
            for layer in self.module.modules()
        )

    def whole(self, weights: Tensors) -> Tensors:
        """A model of this network together with what is frozen: what a `state_dict` holds."""
        return {**self.constants, **weights}

    def completed(self, weights: Tensors, digest: str, where: object) -> Tensors:
        """As `whole`, of weights that were stored without what is frozen.

        Args:
            weights: as they were stored; those that hold what is frozen are left as they are.
            digest: of the frozen tensors that they were trained with (`constants_digest`).
            where: what to call them in errors.

        Raises:
            ModelError: this network's frozen tensors are others.
        """
        if not digest or weights.keys() >= self.constants.keys():
            return weights
        if digest != self.constants_digest:
            raise ModelError(
                f"{where} contains only trained weights, and its frozen weights differ from those "
                f"of this network (SHA-256 {digest[:12]}…, here "
                f"{self.constants_digest[:12] or 'none'}…). Restore the pretrained files, or the "
                "code that builds it"
            )
        return self.whole(weights)

    @property
    def start(self) -> Tensors:
        """All of the network at the start, as a `state_dict` holds it."""
        return self.whole({**self.initial, **self.own})

    def parameters(self, model: Tensors) -> Tensors:
        """The tensors of a model that are parameters, the frozen ones among them; no buffers."""
        return {
            name: tensor
            for name, tensor in self.whole(model).items()
            if name.rpartition("/")[2] not in self.buffers and name not in self.fixed
        }

    def prepare(self, weights: Tensors) -> Tensors:
        """The weights on this network's device, filters laid out as the module bears them."""
        layout = torch.channels_last if self._channels_last else torch.contiguous_format
        return {
            name: tensor.to(self.device, memory_format=layout)
            if tensor.ndim == 4
            else (tensor if tensor.device == self.device else tensor.to(self.device))
            for name, tensor in weights.items()
        }

    @cached_property
    def channels_first(self) -> "Network":
        """A network like this, of images and filters that are laid out channels first."""
        other = deepcopy(self)
        other._lay_out(False)
        return other

    def _samples(self, x: Tensor) -> Tensor:
        """Inputs where the weights are, of their type."""
        return self._typed(x.to(self.device))

    def _typed(self, x: Tensor) -> Tensor:
        """Real inputs in the type of the weights; whole numbers as they are."""
        return x.to(self.dtype) if x.is_floating_point() and x.dtype != self.dtype else x

    def _bind(self, weights: Tensors) -> None:
        """Put tensors in their places in the module; `_unbind` is to follow."""
        for table, key, name, own in self._slots:
            table[key] = weights[name] if name not in self.own else weights.get(name, own)
        for layer, _ in self._depthwise:
            layer.groups = channels_by_weight(layer)

    def _unbind(self) -> None:
        """Put the module's own tensors back."""
        for table, key, _, own in self._slots:
            table[key] = own
        for layer, channels in self._depthwise:
            layer.groups = channels

    def __call__(self, weights: Tensors, x: Tensor, *, training: bool = False) -> Tensor:
        """Outputs [n, width] for the inputs [n, ...] under these weights, at least float32.

        Raises:
            NetworkError: the network's code raised an error, or gives outputs for another number
                of samples.
        """
        if self.module.training != training:
            self.module.train(training)
        if self._channels_last and x.ndim == 4:
            x = channels_last(x)
            weights = {n: filters_last(t) for n, t in weights.items()}
        x = self._typed(x)
        hooks = [pool.register_forward_hook(_relaid) for pool in self._pools] if training else ()
        try:
            self._bind(weights)
            if self.precision == "float32":
                outputs = self._outputs(x)
                narrow = self.dtype.itemsize < torch.float32.itemsize
                return outputs.float() if narrow else outputs
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                return self._outputs(x).float()
        except Exception as error:
            if isinstance(error, FedbayesError) or _of_device(error):
                raise
            raise NetworkError(
                f"the network fails on {_batch(x, training)}: {raised(error, self._name)}"
                f"{_ALONE if training and len(x) == 1 else ''}"
            ) from error
        finally:
            self._unbind()
            for hook in hooks:
                hook.remove()

    def _outputs(self, x: Tensor) -> Tensor:
        """What the module, as it is, computes; images are predicted some at a time."""
        predicts = not (self.module.training or torch.is_grad_enabled())
        if predicts and self._channels_last and x.ndim == 4:
            return by_portions(self._batched, x)
        return self._batched(x)

    def _batched(self, x: Tensor) -> Tensor:
        """What the module computes; of one sample too [1, width], whose axis `squeeze` drops."""
        outputs: Tensor = self.module(x)
        if not isinstance(outputs, Tensor):
            return outputs  # which is refused where networks are built
        if len(x) == 1 and outputs.ndim < 2:
            outputs = outputs.reshape(1, -1)
        if not outputs.ndim or len(outputs) != len(x):
            raise NetworkError(
                f"the network maps {_batch(x, self.module.training)} to outputs of shape "
                f"{tuple(outputs.shape)}. The first axis must count the samples"
            )
        return outputs


def _batch(x: Tensor, training: bool) -> str:
    """A batch, in words."""
    count = len(x)
    kind = "training batch" if training else "batch"
    return f"a {kind} of {count:,} sample{'s' if count != 1 else ''}"


_ALONE = (
    ". Set training.last_batch to 'drop' or 'merge', so that no batch has one sample, or choose "
    "another training.batch_size"
)


def _of_device(error: Exception) -> bool:
    """Whether an error is of the device, and not of the network's code."""
    return isinstance(error, RuntimeError) and (out_of_memory(error) or nondeterministic(error))


def _relaid(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """What a layer that pools gives, in training."""
    return gradient_channels_last(output)
