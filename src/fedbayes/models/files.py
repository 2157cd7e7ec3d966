"""Models from files: any `state_dict`, and the dense layers of a fully connected one."""

import io
import json
import re
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbayes.core.files import read_bytes, require_files
from fedbayes.core.messages import decode_file, metadata
from fedbayes.core.seals import check_seal
from fedbayes.core.tensors import Tensors, named, part
from fedbayes.core.wording import listed
from fedbayes.errors import MessageError, ModelError, RunError, warn

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""Files of PyTorch; all others are taken for safetensors, unless they begin as PyTorch's do."""
PROGRAMS = (".pt2", ".onnx")
"""Files that hold what to compute as well."""
CARD = "fedbayes"
"""Where a file has the card of its model: in the metadata of safetensors, an attribute of the
`state_dict` in a file of PyTorch."""
ORDER = "fedbayes-order"
"""Where the metadata of safetensors have the names of tensors in the order of the `state_dict`, as
JSON: the format itself does not keep it."""
POSTERIOR = "fedbayes-posterior"
"""What the metadata of a file of safetensors name where it holds a posterior: the weights are part
of it then, `weights/…`."""
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ARCHIVE = b"PK\x03\x04"
_PICKLE = b"\x80"
"""How files of PyTorch begin: archives, and those of before version 1.6."""
_INDEX = ".index.json"
"""How the name of an index ends that says which part of a model has which tensor."""
_STATE_DICTS = ("state_dict", "model_state_dict", "model_state", "model")
"""Where checkpoints have the weights."""
_PREFIXES = ("weights/", "module.", "_orig_mod.")
"""What all names begin with in the states of a run's clients, under `DataParallel`, and under
`torch.compile`."""


@dataclass(frozen=True)
class DenseLayer:
    """One fully connected layer of a `state_dict`."""

    name: str
    """Name of the weight, such as `fc1.weight`."""
    weight: Tensor
    """[outputs, inputs]."""
    bias_name: str
    """Name of the bias, whether there is one or not."""
    bias: Tensor | None
    """[outputs], or None."""


def read_weights(path: Path) -> Tensors:
    """The tensors of a model file; see `read_model`."""
    return read_model(path)[0]


def read_model(path: Path) -> tuple[Tensors, str]:
    """The tensors of a model file, safetensors or PyTorch's, and the card in it.

    Nothing but tensors is read: a pickled file goes through PyTorch's `weights_only`. Of a
    checkpoint the `state_dict` alone is taken, without the prefixes of `DataParallel` and
    `torch.compile`.

    Returns:
        Tensors by name, an `OrderedDict` if their order is that of the layers: a file of PyTorch
        keeps it, and so does one of safetensors that this package wrote. Else a `dict` with
        ascending names. And the text that `CARD` names in the file's metadata; empty if none.

    Raises:
        ModelError: the file is absent, damaged, or no dict of tensors.
    """
    if (index := _index_of(path)) is not None:
        return _joined(index), ""
    if path.suffix.lower() in PROGRAMS:
        raise ModelError(
            f"{path} is a program, whose weights cannot be read. Give a file of weights, "
            ".safetensors or .pt (fedbayes export writes both)"
        )
    try:
        data = read_bytes(path)
        pickled = path.suffix.lower() in PICKLED or data.startswith(_ARCHIVE)
        if not data:
            raise MessageError("it is empty")
        if pickled:
            if data.startswith(_ARCHIVE):
                _check_archive(data)
            elif not data.startswith(_PICKLE):
                raise MessageError("it does not begin like a PyTorch file")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of TorchScript, which is refused
                content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        else:
            check_seal(data)
            content = decode_file(data, plain=True)
    except OSError as error:
        raise ModelError(_unread(path, error)) from None
    except (MessageError, UnpicklingError, *_UNREADABLE) as error:
        raise ModelError(_unreadable(path, str(error) or type(error).__name__)) from None
    content = _state_dict(content)
    if not isinstance(content, dict) or not content:
        raise ModelError(f"{path} has no tensors. Save a model's state_dict")
    wrong = [
        name
        for name, item in content.items()
        if not isinstance(name, str) or not isinstance(item, Tensor)
    ]
    if wrong:
        raise ModelError(f"{path}: {wrong[0]!r} is not a tensor. Save only a model's state_dict")
    for name, tensor in content.items():
        if odd := _oddity(tensor):
            raise ModelError(f"{path}: {name!r} is {odd}")
    try:
        # A number of a pickled file may stand for all of a tensor.
        claimed = sum(t.numel() * t.element_size() for t in content.values())
        _refuse_claims(claimed, len(data), 16, "contain tensors of")
    except ValueError as error:
        raise ModelError(_unreadable(path, str(error))) from None
    card = getattr(content, CARD, "") if pickled else metadata(data).get(CARD, "")
    kind: type[dict[str, Tensor]] = OrderedDict
    if not pickled:
        own = part(content, "weights")
        others = content.keys() - named("weights", own)
        if POSTERIOR in metadata(data) or others <= {"temperature", "counts"}:
            if POSTERIOR not in metadata(data) and own and others:
                warn(
                    f"{path} is the state of a client outside its run, so {listed(sorted(others))} "
                    "in it and the standardization of its inputs are not used. Export the network: "
                    "fedbayes export RUN --client NAME"
                )
            content = own  # as of a client's state
        order = _kept_order(metadata(data).get(ORDER, ""), content)
        kind = OrderedDict if order else dict
        content = {name: content[name] for name in order or sorted(content, key=_natural)}
    weights = kind(content)
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = kind((name.removeprefix(prefix), tensor) for name, tensor in weights.items())
    return weights, card if isinstance(card, str) else ""


def _kept_order(text: str, tensors: Tensors) -> list[str]:
    """The names of tensors in the order that a file keeps; empty if it does not keep it."""
    try:
        names = json.loads(text) if text else []
    except ValueError:
        return []
    fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if fits and sorted(names) == sorted(tensors) else []


def kept_order(weights: Tensors) -> dict[str, str]:
    """The order of weights in the metadata of a safetensors file, if they have one."""
    return {ORDER: json.dumps(list(weights))} if _ordered(weights) else {}


def _ordered(weights: Tensors) -> bool:
    """Whether the order of weights is that of a `state_dict`, and not that of their names alone."""
    names = list(weights)
    return isinstance(weights, OrderedDict) or names not in (
        sorted(names),
        sorted(names, key=_natural),
    )


def single(weights: Tensors) -> Tensors:
    """Weights as float32, whatever their precision; an `OrderedDict` stays one."""
    kind = OrderedDict if _ordered(weights) else dict
    return kind((n, t.float() if t.is_floating_point() else t) for n, t in weights.items())


def _index_of(path: Path) -> Path | None:
    """The index of a model in shards, as `transformers` writes it, at a path or in a folder."""
    if path.name.endswith(_INDEX):
        return path
    found = sorted(path.glob(f"*{_INDEX}")) if path.is_dir() else []
    return found[0] if len(found) == 1 else None


def _joined(index: Path) -> Tensors:
    """The tensors of all parts of a model, in natural order of their names."""
    try:
        places = json.loads(read_bytes(index))["weight_map"]
        files = {str(name): str(file) for name, file in places.items()}
    except OSError as error:
        raise ModelError(_unread(index, error)) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(
            f"{index} is not an index of a model's parts: it has no weight_map"
        ) from None
    if odd := next((file for file in files.values() if Path(file).name != file), None):
        raise ModelError(f"{index} lists the part {odd!r}, which is not a file next to it")
    parts = {file: read_weights(index.parent / file) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in parts[file]:
            raise ModelError(f"{index.parent / file} has no tensor '{name}', which {index} lists")
    return {name: parts[files[name]][name] for name in sorted(files, key=_natural)}


def frozen_digest(card: str) -> str:
    """The digest of the frozen weights that a file leaves out, as its card has it; empty if it
    leaves none out.
    """
    try:
        content = json.loads(card) if card else {}
    except ValueError:
        return ""
    digest = content.get("frozen", "") if isinstance(content, dict) else ""
    return digest if isinstance(digest, str) else ""


_UNREADABLE = (
    *(RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, MemoryError, AssertionError, BadZipFile, zlib.error),
)
"""What PyTorch's reader raises on invalid bytes."""
_ROOM = 64 << 20
"""Bytes that a file may hold beyond what its length justifies."""


def _check_archive(data: bytes) -> None:
    """See that an archive, as PyTorch writes it, is whole, and unpacks to about its own size."""
    with ZipFile(io.BytesIO(data)) as archive:
        _refuse_claims(
            sum(entry.file_size for entry in archive.infolist()), len(data), 4, "unpack to"
        )
        if (broken := archive.testzip()) is not None:
            raise ValueError(f"{broken} in it is damaged")


def _refuse_claims(claimed: int, size: int, times: int, what: str) -> None:
    """See that what a file holds is about as large as the file."""
    if claimed > times * size + _ROOM:
        raise ValueError(f"its {size:,} bytes claim to {what} {claimed:,}")


def _oddity(tensor: Tensor) -> str:
    """What keeps a tensor from being taken for weights, and what to do; empty if nothing does."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return "sparse or nested. Save it as a dense tensor, with to_dense()"
    if tensor.device.type != "cpu":
        return f"on device {tensor.device.type!r}, which has no values. Save the weights themselves"
    return ""


def _state_dict(content: object) -> object:
    """The `state_dict` of a checkpoint, which also has an optimizer's state and metrics."""
    if isinstance(content, dict):
        for key in _STATE_DICTS:
            inner = content.get(key)
            if isinstance(inner, dict) and inner:
                return _state_dict(inner)
    return content


def _unread(path: Path, error: OSError) -> str:
    """Why a file of a model was not had from the disk."""
    try:
        require_files([path])
    except RunError as found:
        return str(found)
    return f"cannot read the model {path}: {error.strerror or error}"


def _unreadable(path: Path, reason: str) -> str:
    """What to say of a file that could not be read."""
    foreign = re.search(r"GLOBAL (\S+)", reason)
    if foreign:
        return (
            f"{path} contains a pickled {foreign[1]}, and unpickling it would run code from the "
            "file. Save only its weights: torch.save(model.state_dict(), 'model.pt')"
        )
    if "TorchScript" in reason:
        return (
            f"{path} is a TorchScript archive, whose weights cannot be read. Save its state_dict: "
            "torch.save(torch.jit.load(...).state_dict(), 'model.pt')"
        )
    if "eights only" in reason or "weights_only" in reason or "npickl" in reason:
        return (
            f"{path} contains pickled objects, and unpickling them would run code from the file. "
            "Save only its weights: torch.save(model.state_dict(), 'model.pt')"
        )
    first = reason.strip().splitlines()[0] if reason.strip() else "it is empty"
    return (
        f"{path} is damaged or not a model: {first}. Copy it again, or save a state_dict with "
        "torch.save"
    )


def read_program(path: Path) -> tuple[nn.Module, str]:
    """The module in a `.pt2` file of `torch.export`, and the text of its card.

    A program is code by nature, so it is for files from people that one trusts; but it has no
    need of pickled objects, and with these it is not loaded.

    Raises:
        ModelError: the file is absent, damaged, or holds pickled objects.
    """
    _, module, text = _load_program(path)
    _tie(module)
    return module, text


def with_card(path: Path, text: str) -> bytes:
    """The content of a `.pt2` file with another card; errors as for `read_program`."""
    program, _, _ = _load_program(path)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={f"{CARD}.json": text})
    return buffer.getvalue()


def _load_program(path: Path) -> tuple[torch.export.ExportedProgram, nn.Module, str]:
    """The program in a `.pt2` file, as a module too, and the text of its card."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise ModelError(_unread(path, error)) from None
    try:
        _refuse_pickles(data)
        extra = {f"{CARD}.json": ""}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what programs are made of
            program = torch.export.load(io.BytesIO(data), extra_files=extra)
            module = program.module()
    except UnpicklingError as error:
        raise ModelError(_unreadable(path, str(error))) from None
    except Exception as error:  # of many classes, none of them documented
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"{path} is damaged or not a program of torch.export: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from None
    return program, module, extra[f"{CARD}.json"]


def _tie(module: nn.Module) -> None:
    """Have one parameter again where modules shared one, which a program stores twice."""
    first: dict[tuple[object, ...], nn.Parameter] = {}
    for name, parameter in list(module.named_parameters()):
        place = (parameter.data_ptr(), parameter.shape, parameter.stride())
        same = first.setdefault(place, parameter) if parameter.numel() else parameter
        if same is not parameter:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, same)


def _refuse_pickles(data: bytes) -> None:
    """See that `torch.export.load` would unpickle nothing of a `.pt2`."""
    _check_archive(data)
    with ZipFile(io.BytesIO(data)) as archive:
        if not any(Path(name).name == "archive_format" for name in archive.namelist()):
            raise ValueError("it has no program")
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("_config.json"):
                entries = json.loads(content)["config"].values()
                if any(
                    entry["use_pickle"] or Path(entry["path_name"]).name.startswith(_OBJECTS)
                    for entry in entries
                ):
                    raise UnpicklingError(f"GLOBAL object ({name})")
            elif name.endswith(".pt") and content:
                torch.load(io.BytesIO(content), weights_only=True)


_OBJECTS = ("custom_obj", "opaque_obj")


def other_names(module: nn.Module) -> dict[str, str]:
    """Of tensors that several modules share, the first name, which is theirs, by the others."""

    def named(once: bool) -> Iterable[tuple[str, Tensor]]:
        yield from module.named_parameters(remove_duplicate=once)
        yield from module.named_buffers(remove_duplicate=once)

    first = {id(tensor): name for name, tensor in named(True)}
    return {n: own for n, tensor in named(False) if (own := first[id(tensor)]) != n}


def named_as(weights: Tensors, module: nn.Module) -> Tensors | None:
    """The weights under the names that a module has for them, each once though shared; None if
    they are other weights.

    They may bear these behind a prefix, as a network does that is an attribute of another module,
    or the module's may, as around a network of transformers; and a `state_dict` has a tensor that
    several modules share under each of its names.
    """
    others = other_names(module)
    wanted = module.state_dict().keys() - others.keys()
    prefix, around = (f"{min(one, default='').partition('.')[0]}." for one in (weights, wanted))
    short = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    long = {f"{around}{name}": tensor for name, tensor in weights.items()}
    for found in (weights, short, long):
        own = {name: tensor for name, tensor in found.items() if name not in others}
        if (
            len(found) == len(weights)
            and own.keys() == wanted
            and all(
                torch.equal(tensor, own[others[name]])
                for name, tensor in found.items()
                if name in others
            )
        ):
            return own
    return None


def unlike(weights: Tensors, wanted: Tensors) -> str:
    """How weights are not those of a network, and what to do; a part of a sentence.

    Args:
        weights: as a file has them.
        wanted: the `state_dict` of the network that a config builds.
    """
    absent = [name for name in wanted if name not in weights]
    more = [name for name in weights if name not in wanted]
    other = [
        name for name in wanted if name in weights and weights[name].shape != wanted[name].shape
    ]
    if absent and more:
        odd = f"it has {_listed(more, weights)}, but {_listed(absent, wanted)} are expected"
    elif absent:
        odd = f"it has {_listed(list(weights), weights)}, and lacks {_listed(absent, wanted)}"
    elif more:
        odd = f"it also has {_listed(more, weights)}"
    else:
        odd = f"it has {_listed(other, weights)}, but {_listed(other, wanted)} are expected"
    way = "choose the network of these weights (model.name, model.hidden), or "
    return f"{odd}; {way}save the state_dict of the network that the config builds, with its names"


def _listed(names: Sequence[str], weights: Tensors) -> str:
    """The first of these tensors with their shapes, and how many more there are."""
    shown = ", ".join(
        f"{name} ({' x '.join(map(str, weights[name].shape)) or 'a number'})" for name in names[:3]
    )
    return shown + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def dense_layers(weights: Tensors, source: str) -> list[DenseLayer]:
    """The layers of a fully connected network, first to last.

    The order is that of the `state_dict`. Where the sizes contradict it, it is that of the names,
    numbers by value (`fc2` before `fc10`), or else the one order in which each layer fits the
    next. Where names ascend, and weights are no `OrderedDict`, as in a file of safetensors, names
    that are alike but for a number have the order of these, and others that of the sizes.

    Args:
        weights: a `state_dict` of linear layers alone, with or without biases.
        source: what to call it in errors, such as the file's name.

    Raises:
        ModelError: there are other tensors, NaN or infinite values, layers do not chain, or
            nothing says their order and they chain in several.
    """
    layers, taken = [], set()
    for name, weight in weights.items():
        if weight.ndim != 2:
            continue
        stem = name.removesuffix("weight")
        bias_name = f"{stem}bias" if stem != name else f"{name}.bias"
        bias = weights.get(bias_name)
        if bias is not None and tuple(bias.shape) != (len(weight),):
            raise ModelError(
                f"{source}: {bias_name!r} has shape {tuple(bias.shape)}, which does not fit "
                f"{name!r} of shape {tuple(weight.shape)}"
            )
        taken |= {name, bias_name}
        layers.append(DenseLayer(name, weight, bias_name, bias))
    unknown = [name for name in weights if name not in taken]
    if unknown:
        shape = tuple(weights[unknown[0]].shape)
        raise ModelError(
            f"{source}: {unknown[0]!r} of shape {shape} belongs to no linear layer. Name its "
            "network with --model, or give a program of torch.export (.pt2)"
        )
    if len(layers) < 2:
        raise ModelError(f"{source} has {len(layers)} linear layers, but at least two are needed")
    for layer in layers:
        for name, tensor in ((layer.name, layer.weight), (layer.bias_name, layer.bias)):
            if tensor is not None and tensor.dtype not in _FLOATING:
                raise ModelError(
                    f"{source}: {name!r} has type {tensor.dtype}, not a float of 16 bits or more"
                )
            if tensor is not None and not torch.isfinite(tensor).all():
                raise ModelError(f"{source}: {name!r} has NaN or infinite values")
    return _chained(layers, source, ordered=_ordered(weights))


def relu_network(layers: Sequence[DenseLayer], x: Tensor) -> Tensor:
    """Logits [n, classes] of the fully connected ReLU network of these layers.

    Args:
        layers: first to last; weights of another type than the inputs are taken in theirs.
        x: inputs [n, ...], flattened.
    """
    hidden = x.flatten(1)
    *first, (weight, bias) = (
        (layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))
        for layer in layers
    )
    for inner, inner_bias in first:
        hidden = functional.relu(functional.linear(hidden, inner, inner_bias))
    return functional.linear(hidden, weight, bias)


def _chained(layers: list[DenseLayer], source: str, *, ordered: bool) -> list[DenseLayer]:
    """The layers in an order in which each one's outputs are the next one's inputs."""
    numbered = len({_unnumbered(layer) for layer in layers}) == 1
    for order in (layers, sorted(layers, key=lambda layer: _natural(layer.name))):
        if (ordered or numbered) and _chain(order):
            return order
    orders = _orders(layers, by_number=not (ordered or numbered))
    if len(orders) == 1:
        return orders[0]
    sizes = ", ".join(f"{x.name} {tuple(x.weight.shape)}" for x in layers)
    if orders and not (ordered or numbered):
        raise ModelError(
            f"{source} does not store the order of its layers, and more than one order fits: "
            f"{sizes}. Give its network with --model, or save it as .pt, which stores the order"
        )
    found = "more than one order of them does" if orders else "no order of them does"
    raise ModelError(
        f"{source}: the layers do not fit together in the order of their names, and {found}: "
        f"{sizes}. Rename them so that they sort from first to last"
    )


def _unnumbered(layer: DenseLayer) -> str:
    """The name of a layer without its numbers."""
    return re.sub(r"\d+", "#", layer.name)


_STEPS = 20_000
"""Beginnings of orders that are tried, at most."""


def _orders(layers: list[DenseLayer], *, by_number: bool) -> list[list[DenseLayer]]:
    """Orders of layers in which outputs fit the next inputs: all if at most one, else two."""
    found: list[list[DenseLayer]] = []
    begun: list[tuple[list[DenseLayer], list[DenseLayer]]] = [
        ([], sorted(layers, key=lambda layer: _natural(layer.name)))
    ]
    for _ in range(_STEPS):
        if not begun or len(found) > 1:
            break
        chain, left = begun.pop()
        if not left:
            found.append(chain)
        seen: set[str] = set()
        for place, layer in enumerate(left):
            first = _unnumbered(layer) not in seen
            seen.add(_unnumbered(layer))
            if (first or not by_number) and _chain([*chain[-1:], layer]):
                begun.append(([*chain, layer], left[:place] + left[place + 1 :]))
    return found


def _chain(layers: Sequence[DenseLayer]) -> bool:
    return all(len(one.weight) == two.weight.shape[1] for one, two in pairwise(layers))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts names with their numbers by value."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]
