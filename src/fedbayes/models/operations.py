"""What the operations of PyTorch do with units: a rule for each, of those in use.

An operation without a rule makes what flows into it untouchable (see `fedbayes.models.trace`).
To teach the trace an operation, write its rule here and add a network that uses it to
`tests/helpers/architectures.py`: the tests permute, zero and slice every group of every
network there and compare outputs.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx import Node

from fedbayes.models.trace import Field, Flow, Trace

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Shape = tuple[int, ...]
Arguments = Mapping[str, Any]
"""Of an operation by name, with its defaults; values are `Flow`s."""
Rule = Callable[[Trace, Arguments, Any, str], Any]
"""From the trace, the arguments, the shapes of the results and the operation's name to them."""

RULES: dict[str, Rule] = {}
"""By name of the operation, without its overload."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


_VIEWS = ("alias", "clone", "contiguous", "detach", "detach_", "dropout", "lift_fresh_copy", "to")
_ZERO_TO_ZERO = (
    *_VIEWS,
    *("abs", "alpha_dropout", "celu", "clamp", "clamp_max", "clamp_min", "elu", "erf"),
    *("feature_dropout", "gelu", "hardswish", "hardtanh", "leaky_relu", "mish", "neg", "pow"),
    *("relu", "relu6", "rrelu", "selu", "sign", "silu", "sin", "softsign", "sqrt", "square"),
    *("tanh", "_to_copy"),
)
"""Operations of one value, entry by entry, that leave a zero a zero."""
_OTHERS = (
    *("cos", "eq", "exp", "ge", "gt", "hardsigmoid", "isnan", "le", "log_sigmoid", "logical_not"),
    *("lt", "ne", "sigmoid", "softplus"),
)
"""Operations of one value, entry by entry, that need not."""


@_rule(*_ZERO_TO_ZERO, *_OTHERS)
def _of_each_entry(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    flows = [x for x in args.values() if isinstance(x, Flow)]
    if len(flows) > 1:
        return trace.elementwise([*flows, 1], shape, product=False, reason=name)
    zero = name in _ZERO_TO_ZERO
    if name.startswith(("clamp", "hardtanh")):
        low = args.get("min", args.get("min_val"))
        high = args.get("max", args.get("max_val"))
        zero = (low is None or low <= 0) and (high is None or high >= 0)
    if name == "pow":
        power = args["exponent"]
        zero = isinstance(power, int | float) and power > 0
    return Flow(
        tuple(shape),
        tuple(
            replace(f, zero=f.zero and zero, source=f.source if name in _VIEWS else None)
            for f in flows[0].fields
        ),
    )


@_rule("_assert_tensor_metadata", "_assert_async", "_assert_scalar")
def _nothing(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    return Flow(())


@_rule("add", "sub", "rsub", "maximum", "minimum", "where")
def _sum(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    operands = [args[k] for k in ("condition", "self", "other") if k in args]
    return trace.elementwise(operands, shape, product=False, reason=f"{name}()")


@_rule("masked_fill")
def _masked_fill(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    operands = [args["self"], args["mask"], args["value"]]
    return trace.elementwise(operands, shape, product=False, reason=f"{name}()")


@_rule("mul")
def _product(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    operands = [x for x in (args["self"], args["other"]) if isinstance(x, Flow)]
    return trace.elementwise(operands, shape, product=True, reason="a product")


@_rule("prelu")
def _prelu(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    """Negative entries by a slope: one for all, or one for each channel."""
    x, slope = args["self"], args["weight"]
    letters = list(range(len(shape)))
    operands = [(x, letters)]
    if slope.shape != (1,):
        operands.append((slope, letters[1:2]))
    return trace.merge(operands, shape, letters, product=True, reason="a slope")


@_rule("div")
def _quotient(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    divisor = args["other"]
    if not isinstance(divisor, Flow):
        return trace.elementwise([args["self"]], shape, product=True, reason="a quotient")
    # At a unit that is gone it might be a quotient of zeros.
    for found in divisor.fields:
        trace.untouchable.append((found.atoms, "something is divided by it"))
    return trace.elementwise([args["self"], divisor], shape, product=True, reason="a quotient")


def _multiply(
    trace: Trace, one: Flow, two: Flow, letters: tuple[str, str, str], shape: Shape
) -> Flow:
    """An Einstein sum of two values; letters as in `torch.einsum`."""
    named = [[ord(letter) for letter in part] for part in letters]
    return trace.merge(
        [(one, named[0]), (two, named[1])], shape, named[2], product=True, reason="a product"
    )


def _plus(trace: Trace, flow: Flow, bias: Flow | None, axis: int) -> Flow:
    """With a bias along an axis."""
    if bias is None:
        return flow
    letters = list(range(len(flow.shape)))
    return trace.merge(
        [(flow, letters), (bias, [letters[axis]])],
        flow.shape,
        letters,
        product=False,
        reason="a bias",
    )


_BATCH = "ABCDEFGHIJ"


@_rule("linear")
def _linear(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    batch = _BATCH[: len(shape) - 1]
    result = _multiply(
        trace, args["input"], args["weight"], (batch + "i", "oi", batch + "o"), shape
    )
    return _plus(trace, result, args["bias"], -1)


@_rule("addmm")
def _addmm(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    result = _multiply(trace, args["mat1"], args["mat2"], ("mk", "kn", "mn"), shape)
    return trace.elementwise([result, args["self"]], shape, product=False, reason="a sum")


@_rule("matmul", "mm", "bmm")
def _matmul(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    one, two = args["self"], args["mat2" if "mat2" in args else "other"]
    first, second = len(one.shape), len(two.shape)
    batch = _BATCH[: max(first, second, 2) - 2]
    left = (batch[len(batch) - first + 2 :] if first > 1 else "") + ("mk" if first > 1 else "k")
    right = (batch[len(batch) - second + 2 :] if second > 1 else "") + ("kn" if second > 1 else "k")
    out = batch + "m" * (first > 1) + "n" * (second > 1)
    return _multiply(trace, one, two, (left, right, out), shape)


@_rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    x, weight, groups = args["input"], args["weight"], args["groups"]
    turned = "transpose" in name
    space = len(weight.shape) - 2
    kernel = Flow(weight.shape, tuple(f for f in weight.fields if max(f.axes) < 2))
    for found in weight.fields:
        if max(found.axes) >= 2:
            trace.untouchable.append((found.atoms, ""))
    channel = len(shape) - space - 1
    batch = "n" * channel
    x = trace.spread(x, x.shape, channel + 1, "a convolution")
    places, taps, after = "ABC"[:space], "DEF"[:space], "GHI"[:space]
    rows = "io" if turned else "oi"
    if groups == 1:
        letters = (batch + "i" + places, rows + taps, batch + "o" + after)
        result = _multiply(trace, x, kernel, letters, shape)
    elif groups == x.shape[channel]:
        for found in weight.fields:
            if found.axes == (1,):
                trace.untouchable.append((found.atoms, ""))
        kernel = Flow(kernel.shape[:1], tuple(f for f in kernel.fields if f.axes == (0,)))
        x = _repeated(Flow(x.shape[: channel + 1], x.fields), channel, kernel.shape[0])
        axes = range(channel + 1)
        result = trace.merge(
            [(x, axes), (kernel, axes[-1:])],
            x.shape,
            axes,
            product=True,
            reason="a convolution of single channels",
        )
        result = Flow(tuple(shape), _repeated(result, channel, shape[channel]).fields)
    else:
        reason = "a convolution in groups"
        x, kernel = _one_block(trace, x, channel, groups), _one_block(trace, kernel, 0, groups)
        sizes = (*shape[:channel], groups, shape[channel] // groups, *shape[channel + 1 :])
        letters = (batch + "gi" + places, "g" + rows + taps, batch + "go" + after)
        result = trace.reshape(_multiply(trace, x, kernel, letters, sizes), shape, reason)
    return _plus(trace, result, args["bias"], channel)


def _repeated(flow: Flow, axis: int, size: int) -> Flow:
    """Every entry of an axis as often, sequentially, as gives it this size."""
    fields = []
    for f in flow.fields:
        if axis in f.axes:
            f = replace(f, atoms=f.atoms.repeat(size // flow.shape[axis], f.axes.index(axis)))
        fields.append(f)
    return Flow((*flow.shape[:axis], size, *flow.shape[axis + 1 :]), tuple(fields))


def _one_block(trace: Trace, flow: Flow, axis: int, blocks: int) -> Flow:
    """An axis parted into blocks of one size along a new axis before it."""
    parted = (*flow.shape[:axis], blocks, flow.shape[axis] // blocks, *flow.shape[axis + 1 :])
    fields = []
    for f in trace.reshape(flow, parted, "a convolution in groups").fields:
        if axis in f.axes:
            place = f.axes.index(axis)
            axes = tuple(a for a in f.axes if a != axis) or (axis + 1,)
            atoms = trace.along(f.atoms, [place])
            f = replace(f, axes=axes, atoms=atoms.reshape(atoms.shape or (1,)))
        fields.append(f)
    return Flow(parted, tuple(fields))


def _normalized(
    trace: Trace, x: Flow, weight: Flow | None, bias: Flow | None, others: Sequence[Flow], axis: int
) -> Flow:
    """A normalization with scale and shift along an axis: zero where both are."""
    letters = list(range(len(x.shape)))
    operands = [x, *others, *(p for p in (weight, bias) if p is not None)]
    merged = trace.merge(
        [(flow, letters if flow is x else [axis]) for flow in operands],
        x.shape,
        letters,
        product=False,
        constant=True,
        reason="a normalization",
    )
    zero = weight is not None and bias is not None and bias.at(0) is not None
    fields = (replace(f, zero=zero and axis in f.axes) for f in merged.fields)
    return Flow(x.shape, tuple(fields))


@_rule("batch_norm", "instance_norm")
def _batch_norm(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    running = [args[k] for k in ("running_mean", "running_var") if args[k] is not None]
    return _normalized(trace, args["input"], args["weight"], args["bias"], running, 1)


@_rule("group_norm")
def _group_norm(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    x, groups = args["input"], args["num_groups"]
    found = x.at(1)
    if found is not None:
        if found.axes != (1,):
            trace.untouchable.append((found.atoms, "a group normalization of other axes"))
        size = x.shape[1] // groups
        trace.cells.append((found.atoms, 1 + np.arange(x.shape[1]) // size))
        trace.group_norms.append((found.atoms, trace.module))
    for other in x.fields:
        if 1 not in other.axes:
            trace.untouchable.append((other.atoms, "a group normalization goes across it"))
    return _normalized(trace, x, args["weight"], args["bias"], [], 1)


@_rule("layer_norm", "rms_norm")
def _layer_norm(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    x: Flow = args["input"]
    weight, bias = args["weight"], args.get("bias")
    if len(args["normalized_shape"]) > 1:
        flows = [p for p in (x, weight, bias) if p is not None]
        trace.refuse(flows, "a layer normalization over several axes")
        return Flow(tuple(shape))
    last = len(x.shape) - 1
    found = x.at(last)
    if found is not None:
        trace.mixed.append((found.atoms, "a layer normalization mixes its units"))
    result = _normalized(trace, x, weight, bias, [], last)
    if name == "rms_norm" and weight is not None:
        fields = tuple(replace(f, zero=last in f.axes) for f in result.fields)
        result = Flow(result.shape, fields)
    return result


@_rule("embedding")
def _embedding(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    weight = args["weight"]
    for found in weight.fields:
        if 0 in found.axes:
            trace.untouchable.append((found.atoms, ""))
    trace.refuse([args["indices"]], "an embedding is looked up by it")
    last = len(shape) - 1
    found = weight.at(1)
    if found is None or found.axes != (1,):
        return Flow(tuple(shape))
    if found.source is not None:
        trace.makers.add(found.source)
    return Flow(tuple(shape), (Field((last,), found.atoms, found.zero),))


@_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshape(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    return trace.reshape(args["self"], shape, f"{name}()")


@_rule("transpose", "permute", "t", "numpy_T", "mT", "movedim", "swapaxes")
def _permute(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    flow: Flow = args["self"]
    sizes = range(2, 2 + len(flow.shape))
    turned = args["operation"](
        torch.empty(tuple(sizes), device="meta"),
        *(value for key, value in args.items() if key not in ("self", "operation")),
    )
    came = [size - 2 for size in turned.shape]
    fields = (replace(f, axes=tuple(came.index(a) for a in f.axes)) for f in flow.fields)
    return Flow(tuple(shape), tuple(fields))


@_rule("expand")
def _expand(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    flow: Flow = args["self"]
    shift, fields = len(shape) - len(flow.shape), []
    for f in flow.fields:
        axes = tuple(axis + shift for axis in f.axes)
        if f.atoms.shape == tuple(shape[axis] for axis in axes):
            fields.append(replace(f, axes=axes, source=None))
        else:
            trace.untouchable.append((f.atoms, "expand() repeats it"))
    return Flow(tuple(shape), tuple(fields))


def _index(size: int, start: int | None, end: int | None, step: int) -> Any:
    return np.arange(size)[slice(start, end, step)]


@_rule("slice")
def _slice(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    flow: Flow = args["self"]
    index = _index(flow.shape[args["dim"]], args["start"], args["end"], args["step"])
    if len(index) == flow.shape[args["dim"]]:
        return flow
    return trace.pick(flow, args["dim"], index, shape)


@_rule("narrow")
def _narrow(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    index = np.arange(args["start"], args["start"] + args["length"])
    return trace.pick(args["self"], args["dim"], index, shape)


@_rule("split", "split_with_sizes", "chunk", "tensor_split")
def _split(trace: Trace, args: Arguments, shape: Sequence[Shape], name: str) -> list[Flow]:
    flow, dim = args["self"], args["dim"] % len(args["self"].shape)
    pieces, start = [], 0
    for part in shape:
        index = np.arange(start, start + part[dim])
        pieces.append(trace.pick(flow, dim, index, part))
        start += part[dim]
    return pieces


def _one(trace: Trace, flow: Flow, dim: int, at: int, shape: Shape) -> Flow:
    """One entry of an axis, which goes."""
    dim %= len(flow.shape)
    fields = []
    for f in flow.fields:
        if f.axes == (dim,):
            trace.untouchable.append((f.atoms, "single units are selected"))
        else:
            fields.append(f)
    kept = Flow(flow.shape, tuple(fields))
    sizes = [1 if axis == dim else size for axis, size in enumerate(flow.shape)]
    picked = trace.pick(kept, dim, np.array([at % flow.shape[dim]]), sizes)
    return trace.reshape(picked, shape, "select()")


@_rule("select")
def _select(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    return _one(trace, args["self"], args["dim"], args["index"], shape)


@_rule("unbind")
def _unbind(trace: Trace, args: Arguments, shape: Sequence[Shape], name: str) -> list[Flow]:
    flow, dim = args["self"], args["dim"]
    return [_one(trace, flow, dim, at, part) for at, part in enumerate(shape)]


@_rule("cat", "concat")
def _cat(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    flows: list[Flow] = args["tensors"]
    dim = args["dim"] % len(shape)
    joined = [flow.at(dim) for flow in flows]
    fields: tuple[Field, ...] = ()
    others = []
    if any(f is not None for f in joined):
        if any(f is not None and f.axes != (dim,) for f in joined):
            trace.refuse(flows, "cat() of several axes at once")
            return Flow(tuple(shape))
        atoms = []
        for f, flow in zip(joined, flows, strict=True):
            if f is None:
                entries = trace.fresh(flow.shape[dim])
                trace.untouchable.append((entries, ""))
            else:
                entries = f.atoms
            atoms.append(entries)
        zero = all(f.zero for f in joined if f is not None)
        fields = (Field((dim,), np.concatenate(atoms), zero),)
    for flow in flows:
        rest = tuple(f for f in flow.fields if dim not in f.axes)
        others.append(Flow(tuple(1 if a == dim else n for a, n in enumerate(flow.shape)), rest))
    merged = trace.elementwise(others, others[0].shape, product=False, reason="cat()")
    return Flow(tuple(shape), fields + merged.fields)


@_rule("pad", "constant_pad_nd")
def _pad(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    flow: Flow = args["self"]
    if args.get("mode", "constant") != "constant":
        return trace.spread(flow, shape, len(shape) - len(args["pad"]) // 2, "padding")
    zero = args["value"] in (None, 0)
    ends = {}
    for place in range(len(args["pad"]) // 2):
        before, after = args["pad"][2 * place : 2 * place + 2]
        if before or after:
            ends[len(shape) - 1 - place] = (before, after)
    fields = []
    for f in flow.fields:
        touched = [axis for axis in f.axes if axis in ends]
        if any(min(ends[axis]) < 0 for axis in touched):
            trace.untouchable.append((f.atoms, "pad() removes single units"))
            continue
        number = trace.pad() if touched else 0
        widths = [ends.get(axis, (0, 0)) for axis in f.axes]
        atoms = np.pad(f.atoms, widths, constant_values=number)
        fields.append(replace(f, atoms=atoms, zero=f.zero and zero, source=None))
    return Flow(tuple(shape), tuple(fields))


def _spread(places: int) -> Rule:
    def rule(trace: Trace, args: Arguments, shape: Any, name: str) -> Any:
        flow: Flow = next(iter(args.values()))
        several = bool(shape) and isinstance(shape[0], tuple)
        first = shape[0] if several else shape
        spread = trace.spread(flow, first, len(first) - places, f"{name}()")
        return [replace(spread, shape=part) for part in shape] if several else spread

    return rule


for _places in (1, 2, 3):
    for _kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        RULES[f"{_kind}{_places}d"] = _spread(_places)
RULES["upsample_nearest2d"] = RULES["upsample_bilinear2d"] = _spread(2)
RULES["upsample_nearest1d"] = RULES["upsample_linear1d"] = _spread(1)


@_rule("mean", "sum", "amax", "amin", "var", "std")
def _summary(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    dims = args.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    keepdim = bool(args.get("keepdim", False))
    return trace.reduce(
        args["self"],
        dims,
        keepdim,
        shape,
        adds=name == "sum",
        reason=f"{name}() over its units",
    )


@_rule("softmax", "log_softmax", "_softmax", "_log_softmax")
def _softmax(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    flow: Flow = args["self"]
    dim = args["dim"] % len(flow.shape)
    for f in flow.fields:
        if dim in f.axes:
            trace.mixed.append((f.atoms, f"{name}() over its units"))
    return Flow(flow.shape, tuple(replace(f, zero=False, source=None) for f in flow.fields))


@_rule("scaled_dot_product_attention")
def _attention(trace: Trace, args: Arguments, shape: Shape, name: str) -> Flow:
    query, key, value = args["query"], args["key"], args["value"]
    if args["enable_gqa"]:
        trace.refuse([query, key, value], "attention with grouped queries")
        return Flow(tuple(shape))
    batch = _BATCH[: len(shape) - 2]
    for flow in (query, key):
        found = flow.at(-1)
        if found is not None and len(found.axes) == 1:
            trace.mixed.append((found.atoms, "attention scales by the number of its units"))
    scores = (*query.shape[:-1], key.shape[-2])
    weights = _multiply(trace, query, key, (batch + "td", batch + "sd", batch + "ts"), scores)
    if args["attn_mask"] is not None:
        weights = trace.elementwise(
            [weights, args["attn_mask"]], scores, product=False, reason="a mask"
        )
    weights = Flow(scores, tuple(replace(f, zero=False) for f in weights.fields))
    return _multiply(trace, weights, value, (batch + "ts", batch + "sv", batch + "tv"), shape)


def follow(program: "ExportedProgram") -> Trace:
    """The trace of an exported network: atoms carried through all of its operations."""
    trace = Trace()
    signature = program.graph_signature
    names = tensor_names(program)
    passing = set(signature.non_persistent_buffers)
    values: dict[Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if not node.users:
                continue  # the other name of a shared tensor, say
            name = names.get(node.name)
            name = None if name in passing else name
            shape = _shapes(node.meta.get("val"))
            trained = node.name in signature.inputs_to_parameters
            values[node] = Flow(shape) if name is None else _entry(trace, name, shape, trained)
        elif node.op == "output":
            for flow in _flows(_resolved(node.args, values)):
                trace.outputs.extend(found.atoms for found in flow.fields)
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        else:
            for used in node.all_input_nodes:
                if used.name in names:
                    trace.order.setdefault(names[used.name], len(trace.order))
            values[node] = _step(trace, node, values)
            _note_across(trace, node, values[node], names)
    trace.readers -= trace.makers
    return trace


def _note_across(trace: Trace, node: Node, result: Any, names: Mapping[str, str]) -> None:
    """Of a layer, units that lie along other axes of its result than that of its channels."""
    name = _name(node)
    weights = [names[used.name] for used in node.all_input_nodes if used.name in names]
    if not weights or not (name.startswith(("conv", "linear")) or name.endswith("norm")):
        return
    channel = len(result.shape) - 1
    if name.startswith("conv"):
        channel -= int(name[-2])
    elif name in ("batch_norm", "group_norm", "instance_norm"):
        channel = 1
    others = [f.atoms for f in result.fields if set(f.axes) != {channel}]
    trace.across.setdefault(weights[0], []).extend(others)


def tensor_names(program: "ExportedProgram") -> dict[str, str]:
    """Names of the parameters and buffers that placeholders stand for.

    A tensor that several modules share has one name, its first, as `nn.Module.named_parameters`
    has it; operations get it by the last one.
    """
    signature = program.graph_signature
    own = dict((*program.named_parameters(), *program.named_buffers()))
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    given = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {placeholder: first[id(own[name])] for placeholder, name in given.items()}


def _entry(trace: Trace, name: str, shape: Shape, trained: bool) -> Flow:
    """A parameter or a buffer, with new atoms along its axes."""
    fields = []
    for axis, size in enumerate(shape):
        if size == 1 and (axis > 1 or (axis == 1 and shape[0] == 1)):
            continue
        atoms = trace.fresh(size)
        trace.axes[name, axis] = atoms
        fields.append(Field((axis,), atoms, zero=trained, source=(name, axis)))
    return Flow(shape, tuple(fields))


def _step(trace: Trace, node: Node, values: Mapping[Node, Any]) -> Any:
    """The result of one operation."""
    shape = _shapes(node.meta.get("val"))
    several = bool(shape) and isinstance(shape[0], tuple)
    unknown = [Flow(part) for part in shape] if several else Flow(shape)
    flows = _flows(_resolved((node.args, node.kwargs), values))
    if not any(flow.fields for flow in flows):
        return unknown
    schema = getattr(node.target, "_schema", None)
    name = _name(node)
    if schema is None:
        trace.refuse(flows, f"{name}() is not known")
        return unknown
    if name.endswith("_") and not name.startswith("_"):
        changed = node.args[0]
        if not isinstance(changed, Node) or len(changed.users) > 1 or _is_view(changed):
            trace.refuse(flows, f"{name}() changes a value that others use")
            return unknown
        name = name.removesuffix("_")
    rule = RULES.get(name)
    if rule is None:
        trace.refuse(flows, f"{name}() is not known")
        return unknown
    args = {}
    for index, argument in enumerate(schema.arguments):
        value = node.kwargs.get(argument.name, argument.default_value)
        value = node.args[index] if index < len(node.args) else value
        args[argument.name] = _resolved(value, values)
    args["operation"] = node.target
    trace.module = next(reversed(node.meta.get("nn_module_stack", {"": ("", None)}).values()))[0]
    return rule(trace, args, shape, name)


def _is_view(node: Node) -> bool:
    """Whether a value may share its memory with another."""
    name = _name(node)
    if name.endswith("_"):  # it returns what it changed
        return not isinstance(node.args[0], Node) or _is_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    if schema is None or name in _VIEWS:
        return True
    return any(result.alias_info is not None for result in schema.returns)


def _name(node: Node) -> str:
    """Of the operation, without its overload."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", str(node.target))


def _shapes(value: Any) -> Any:
    """Shape of a value, or of each of several."""
    if isinstance(value, list | tuple):
        return [_shapes(part) for part in value]
    return tuple(int(size) for size in getattr(value, "shape", ()))


def _resolved(argument: Any, values: Mapping[Node, Any]) -> Any:
    """An argument with values instead of nodes."""
    if isinstance(argument, Node):
        return values[argument]
    if isinstance(argument, list | tuple):
        return [_resolved(part, values) for part in argument]
    if isinstance(argument, Mapping):
        return {key: _resolved(part, values) for key, part in argument.items()}
    return argument


def _flows(argument: Any) -> list[Flow]:
    """All values in an argument."""
    if isinstance(argument, Flow):
        return [argument]
    if isinstance(argument, Mapping):
        argument = list(argument.values())
    if isinstance(argument, list):
        return [flow for part in argument for flow in _flows(part)]
    return []
