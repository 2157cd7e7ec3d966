"""LoRA adapters in files: folders of PEFT, and client files of a federation with adapters."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbayes.core import pretrained
from fedbayes.core.files import parse_json, read_text, writable_folder, write_beside
from fedbayes.core.seals import sealed
from fedbayes.core.tensors import Tensors
from fedbayes.core.wording import listed
from fedbayes.errors import ModelError, RunError, told_as
from fedbayes.fusion.low_rank import LowRank
from fedbayes.models import ModelSettings, build, read_weights
from fedbayes.models.files import kept_order
from fedbayes.models.network import digest_of
from fedbayes.models.open import open_weights
from fedbayes.models.others import ImageNetwork, TextNetwork
from fedbayes.models.settings import OTHERS
from fedbayes.storage.card import Card
from fedbayes.workflows.fuse.posterior_files import is_posterior
from fedbayes.workflows.serve.evaluation_set import is_program
from fedbayes.workflows.serve.model_files import ModelFiles, write_model

CONFIG = "adapter_config.json"
TENSORS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
"""What PEFT puts before the names of a network."""
_WRAPPED = "network."
"""What a network of texts or images of ours puts before them."""
FROZEN = ".base_layer."
"""Part of its names for frozen weights of a changed layer."""
_PARTS = {".lora_A.weight": "a", ".lora_B.weight": "b"}
_ODD = ("use_dora", "use_qalora", "lora_bias", "use_bdlora")
"""Flags of LoRA's relatives, whose change of a layer is more than B A."""
_ODDER = (
    *("layer_replication", "alora_invocation_tokens", "trainable_token_indices"),
    *("target_parameters", "arrow_config", "megatron_config", "kasa_config", "velora_config"),
    "monteclora_config",
)
"""Likewise, by settings that are not empty."""
_OF_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the base network."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of a frozen network."""

    source: str
    """Its file or folder."""
    layers: Mapping[str, LowRank]
    """Changes of layers, by name."""
    saved: Tensors
    """What was trained besides them, such as a head, by name."""
    frozen: Tensors
    """Frozen weights of changed layers that PEFT saved too, by its names (`base_layer`)."""
    base: str
    """Name or folder of the frozen network; empty if nothing says it."""
    config: Mapping[str, Any]
    """`adapter_config.json`."""
    digest: str = ""
    """Of the frozen weights, where it is known."""
    card: Card | None = None
    """Of a client's file."""
    settings: ModelSettings | None = None
    """Its network."""

    @property
    def rank(self) -> int:
        """The largest of its layers."""
        return max(change.rank for change in self.layers.values())


def is_adapter(path: Path, files: ModelFiles) -> bool:
    """Whether a path is of an adapter: a folder, or a client's file of a federation with LoRA."""
    if path.is_dir():
        return True
    if is_program(path) or is_posterior(path):
        return False
    card = files[path][1]
    own = {} if card is None else card.model
    return own.get("trains") == "lora" and own.get("name") in OTHERS


def read_adapters(
    paths: Sequence[Path], files: ModelFiles, base: str | None = None
) -> list[Adapter]:
    """Adapters of one base network.

    Args:
        paths: their folders or files.
        files: those that were read before.
        base: the network that a user says all folders are of, whatever they say.

    Raises:
        ModelError: one cannot be read, is of another kind than LoRA, or they do not go together.
    """
    if not any(path.is_dir() for path in paths) and files.card(paths) is None:
        raise ModelError(
            "the clients' adapters differ in their inputs or targets. Leave out those that differ"
        )
    found = [_of_folder(path) if path.is_dir() else _of_client(path, files) for path in paths]
    first = found[0]
    for other in found[1:]:
        if (first.card is None) != (other.card is None):
            raise ModelError(
                f"{first.source} and {other.source}: one is a PEFT folder and the other a "
                "client's file, whose base networks cannot be compared. Give all in one form"
            )
        if other.digest != first.digest or (not first.digest and not base and _moved(other, first)):
            way = "Fuse adapters of one base network"
            if not first.digest:
                way += f", or write one base_model_name_or_path into each {CONFIG} if it is one"
            raise ModelError(
                f"{other.source} is an adapter of another base network ({_base(other)}) than "
                f"{first.source} ({_base(first)}). {way}"
            )
        tasks = [str(one.config.get("task_type")) for one in (first, other)]
        if len(set(tasks)) > 1 and "None" not in tasks:
            raise ModelError(
                f"{first.source} is for {tasks[0]} and {other.source} for {tasks[1]} (task_type). "
                "Fuse adapters for one task"
            )
        for name in sorted(first.saved.keys() ^ other.saved.keys()):
            has, lacks = (first, other) if name in first.saved else (other, first)
            raise ModelError(
                f"{has.source} also trained {name!r}, but {lacks.source} did not. Fuse adapters "
                "with the same modules_to_save"
            )
        for name, tensor in first.saved.items():
            if other.saved[name].shape != tensor.shape:
                raise ModelError(
                    f"{other.source} has {name!r} of shape {tuple(other.saved[name].shape)} and "
                    f"{first.source} {tuple(tensor.shape)}. Fuse heads of one size"
                )
        _check_layers(first, other)
        for name in sorted(first.frozen.keys() & other.frozen.keys()):
            if not torch.equal(first.frozen[name], other.frozen[name].to(first.frozen[name])):
                raise ModelError(
                    f"{first.source} and {other.source} have different frozen weights {name!r}. "
                    "Fuse adapters of one base network"
                )
    return found


def _check_layers(first: Adapter, other: Adapter) -> None:
    """See that layers of one name have one shape."""
    for one, two in ((first, other), (other, first)):
        for name in one.layers.keys() - two.layers.keys():
            if long := next((n for n in two.layers if n.endswith(f".{name}")), None):
                raise ModelError(
                    f"{one.source} changes the layer {name}, {two.source} {long}: adapters of two "
                    "classes of one network. Fuse adapters of one class"
                )
    for name in first.layers.keys() & other.layers.keys():
        shapes = [(len(a.layers[name].b), a.layers[name].a.shape[1]) for a in (first, other)]
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"{other.source} changes the layer {name} of shape {shapes[1]}, {first.source} of "
                f"shape {shapes[0]}. Fuse adapters of one base network"
            )


def _moved(other: Adapter, first: Adapter) -> bool:
    """Whether folders name different base networks."""
    return pretrained.absolute(other.base) != pretrained.absolute(first.base)


def _base(adapter: Adapter) -> str:
    more = f", SHA-256 {adapter.digest[:12]}…" if adapter.digest else ""
    return f"{adapter.base or 'not named'}{more}"


def _of_folder(path: Path) -> Adapter:
    """An adapter of PEFT."""
    file = path / CONFIG
    if not file.is_file():
        raise ModelError(
            f"{path} has no {CONFIG}. Give a PEFT folder with {CONFIG} and {TENSORS[0]}, or a "
            "model file"
        )
    with told_as(ModelError, f"cannot read {file}", OSError, ValueError):
        config = parse_json(read_text(file))
    if not isinstance(config, dict):
        raise ModelError(f"{file} has no table of settings")
    _refuse(config, str(path))
    place = next((path / name for name in TENSORS if (path / name).is_file()), None)
    if place is None:
        raise ModelError(f"{path} has no {TENSORS[0]}. Save the adapter with save_pretrained")
    tensors = {_plain(name): tensor for name, tensor in read_weights(place).items()}
    base = str(config.get("base_model_name_or_path") or "")
    revision = config.get("revision")
    if base and revision and not Path(base).is_dir():
        base = f"{base}@{revision}"
    known = {name: tensors.pop(name) for name in list(tensors) if FROZEN in name}
    layers, saved = _split(tensors, str(path))
    with told_as(ModelError, f"cannot read {file}", re.error, AttributeError, TypeError):
        scales = {name: _scale(config, name, one.rank, path) for name, one in layers.items()}
    return Adapter(
        str(path),
        {name: replace(one, scale=scales[name]) for name, one in layers.items()},
        saved,
        known,
        base,
        config,
    )


def _plain(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(".modules_to_save.", ".")


def _refuse(config: Mapping[str, Any], source: str) -> None:
    """See that a config is of plain LoRA."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{source} is an adapter of the type {kind}. Only LORA can be fused")
    odd = [name for name in _ODD if config.get(name)] + [n for n in _ODDER if config.get(n)]
    if odd:
        what = "DoRA" if odd[0] == "use_dora" else f"a relative of LoRA ({odd[0]})"
        raise ModelError(
            f"{source} is {what}, whose change of a layer is not B A. Merge it into the base "
            "network (merge_and_unload) and fuse whole networks, or train plain LoRA"
        )
    if config.get("bias", "none") != "none":
        raise ModelError(
            f"{source} also trained biases of the base network (bias = {config['bias']!r}). Fuse "
            "adapters with bias = 'none'"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OF_BASE):
        raise ModelError(
            f"{source} starts with {start}, which changes the base network. Save it as plain LoRA "
            "(path_initial_model_for_weight_conversion of save_pretrained)"
        )


def _split(tensors: Tensors, source: str) -> tuple[dict[str, LowRank], Tensors]:
    """Changes of layers, at scale 1, and what else was trained."""
    parts: dict[str, dict[str, Tensor]] = {}
    saved: Tensors = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ModelError(
                f"{source} saved {name!r}, which counts something and has no mean. Leave its layer "
                "out of modules_to_save"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{source}: {name!r} has values that are not finite")
        end = next((end for end in _PARTS if name.endswith(end)), None)
        if end is not None:
            parts.setdefault(name.removesuffix(end), {})[_PARTS[end]] = tensor
        elif ".lora_" in name:
            raise ModelError(f"{source}: {name!r} is not a factor A or B of a dense layer")
        else:
            saved[name] = tensor
    layers = {}
    for layer, both in parts.items():
        if both.keys() != {"a", "b"}:
            raise ModelError(f"{source} has only one factor of the layer {layer}")
        a, b = both["a"], both["b"]
        if a.ndim != 2 or b.ndim != 2:
            raise ModelError(
                f"{source} changes the convolution {layer}. Only adapters of dense layers can be "
                "fused"
            )
        if len(a) != b.shape[1] or not len(a):
            raise ModelError(
                f"{source}: factors of {layer} have shapes {tuple(a.shape)} and {tuple(b.shape)}"
            )
        layers[layer] = LowRank(a, b)
    if not layers:
        raise ModelError(f"{source} changes no layer: it has no lora_A and lora_B")
    return layers, saved


def _scale(config: Mapping[str, Any], layer: str, rank: int, path: Path) -> float:
    """lora_alpha / r, or over √r (rsLoRA), by the patterns of names."""
    alpha = _pattern(config.get("alpha_pattern"), layer, config.get("lora_alpha"))
    wanted = _pattern(config.get("rank_pattern"), layer, config.get("r"))
    if wanted != rank:
        raise ModelError(
            f"{path}: {layer} has the rank {rank}, but its config has {wanted!r}. Save both "
            "together"
        )
    if not isinstance(alpha, int | float) or not alpha > 0:
        raise ModelError(f"{path}: lora_alpha is {alpha!r}. It must be above 0")
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _pattern(table: Any, layer: str, default: Any) -> Any:
    """The value of the first pattern that the end of a name fits, as PEFT has it."""
    for pattern, value in (table or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _of_client(path: Path, files: ModelFiles) -> Adapter:
    """The adapter in a client's file."""
    weights, card = files[path]
    assert card is not None
    settings = card.network()
    assert settings is not None
    likelihood, source = card.likelihood, str(path)
    if likelihood.head() is not None:
        raise ModelError(
            f"{source} has learned noise, which is not part of an adapter. Set task.noise to a "
            "number when you train adapters to fuse"
        )
    opened = open_weights(
        weights, settings, card.preprocessing.shape, likelihood, source, frozen=card.frozen or None
    )
    whole = opened.require()
    trained = opened.network.initial.keys()
    wrapped = isinstance(opened.network.module, TextNetwork | ImageNetwork)
    names = {name: name.removeprefix(_WRAPPED) if wrapped else name for name in whole}
    ours = {n: t for n, t in whole.items() if ".lora_" in n or n in trained}
    constants = {**opened.network.constants, **whole}
    digest = digest_of({n: t for n, t in constants.items() if n not in ours})
    tensors = {names[n].replace(".default.weight", ".weight"): t for n, t in ours.items()}
    layers, saved = _split(tensors, source)
    scale = settings.lora_alpha / settings.lora_rank
    return Adapter(
        source,
        {name: replace(one, scale=scale) for name, one in layers.items()},
        saved,
        {},
        "" if settings.scratch or settings.name == "timm" else str(settings.pretrained),
        _config_of(settings, saved, isinstance(opened.network.module, TextNetwork)),
        digest,
        card,
        settings,
    )


def _config_of(settings: ModelSettings, saved: Tensors, texts: bool) -> dict[str, Any]:
    """What PEFT wants to know of an adapter of ours."""
    plain = settings.name == "timm"
    heads = {n.rpartition(".")[0] if plain else n.partition(".")[0] for n in saved}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if texts else None,
        "base_model_name_or_path": str(settings.pretrained).partition("@")[0],
        "revision": str(settings.pretrained).partition("@")[2] or None,
        "lora_dropout": settings.lora_dropout,
        "modules_to_save": sorted(heads) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def check_out(out: Path, adapters: Sequence[Adapter], inputs: Sequence[Path]) -> None:
    """See that the fused adapter can be written where it is wanted.

    Raises:
        RunError: it cannot.
        ModelError: what is written there cannot be of these adapters.
    """
    first = adapters[0]
    if out.suffix.lower() == ".safetensors" and not out.is_dir():
        if any(one.card is None for one in adapters):
            raise RunError(
                f"the adapter {out}: PEFT adapters are written to a folder. Give one, such as -o "
                f"{out.with_suffix('')}/"
            )
        targets = [one.settings.lora_targets for one in adapters if one.settings is not None]
        if len(set(targets)) > 1:
            raise ModelError(
                "the clients' adapters have different lora_targets, but a file has room for one. "
                f"Give a folder, such as -o {out.with_suffix('')}/"
            )
        return
    if out.suffix and not out.is_dir():
        raise RunError(
            f"the adapter {out}: give a folder, or a .safetensors file if all adapters are "
            "clients' files"
        )
    if first.settings is not None and first.settings.scratch:
        raise ModelError(
            "the base network has random weights (model.scratch), which PEFT cannot load. Give a "
            "file, such as -o fused.safetensors"
        )
    writable_folder(out, "the adapter")
    if out.resolve() in {path.resolve() for path in inputs}:
        raise RunError(f"the adapter {out} would replace one of the inputs. Give another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / CONFIG).is_file():
        raise RunError(f"the adapter {out}: the folder has other files. Give a new folder")


def write_adapter(
    out: Path,
    adapters: Sequence[Adapter],
    layers: Mapping[str, LowRank],
    saved: Tensors,
    rank: int,
    method: str,
    base: str | None = None,
    temperature: float = 1.0,
) -> Path:
    """Write a fused adapter, and return its file of tensors.

    Args:
        out: a folder, or a file of the form of a client's.
        adapters: what it was fused from.
        layers: its changes, all of one rank and of scale 1.
        saved: what is saved besides them.
        rank: of the changes.
        method: how it was fused.
        base: the network that a user says it is of.
        temperature: of its predictions, which a file's card has; a folder has no place for it.
    """
    kinds = {t.dtype for one in adapters for change in one.layers.values() for t in (change.a,)}
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    if out.suffix.lower() == ".safetensors" and not out.is_dir():
        _write_file(out, adapters[0], layers, saved, rank, method, temperature)
        return out
    known = {name: tensor for one in adapters for name, tensor in one.frozen.items()}
    tensors = {f"{_PREFIX}{name}": tensor for name, tensor in known.items()}
    tensors |= {f"{_PREFIX}{n}": t.to(adapters[0].saved[n].dtype) for n, t in saved.items()}
    for name, change in layers.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = (change.scale * change.a).to(kind)
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = change.b.to(kind)
    config = {
        **adapters[0].config,
        **{"r": rank, "lora_alpha": rank, "use_rslora": False, "inference_mode": True},
        **{"rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True},
        "target_modules": sorted(layers),
        **dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules")),
    }
    if base is not None:
        own, _, revision = (base, "", "") if Path(base).is_dir() else base.partition("@")
        config["base_model_name_or_path"] = pretrained.absolute(own)
        config["revision"] = revision or None
    out.mkdir(parents=True, exist_ok=True)
    file = out / TENSORS[0]
    # A folder without a config is no adapter, so the config comes last.
    (out / CONFIG).unlink(missing_ok=True)
    for other in TENSORS[1:]:
        (out / other).unlink(missing_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_beside(file, sealed(tensors, {"format": "pt", **kept_order(tensors)}))
    write_beside(out / CONFIG, json.dumps(config, indent=2).encode())
    return file


def _write_file(
    out: Path,
    first: Adapter,
    layers: Mapping[str, LowRank],
    saved: Tensors,
    rank: int,
    method: str,
    temperature: float,
) -> None:
    """Write a client's file with the fused adapter."""
    assert first.settings is not None
    assert first.card is not None
    settings = first.settings.model_copy(
        update={"lora_rank": rank, "lora_alpha": float(rank), "lora_trains": "both"}
    )
    card, likelihood = first.card, first.card.likelihood
    network = build(
        settings, card.preprocessing.shape, likelihood.outputs, head=likelihood.head(), seed=0
    )
    wrapped = isinstance(network.module, TextNetwork | ImageNetwork)
    before = _WRAPPED if wrapped else ""
    weights = {f"{before}{name}": tensor.float() for name, tensor in saved.items()}
    for name, change in layers.items():
        weights[f"{before}{name}.lora_A.default.weight"] = (change.scale * change.a).float()
        weights[f"{before}{name}.lora_B.default.weight"] = change.b.float()
    if weights.keys() != network.initial.keys():
        odd = sorted(weights.keys() ^ network.initial.keys())
        raise ModelError(f"{out}: {listed(odd, 3)} are in only one of network and adapter")
    whole = {name: weights[name].contiguous() for name in network.initial}
    card = replace(
        card.of_fused(method),
        model=settings.model_dump(mode="json", exclude={"weights"}),
        frozen=network.constants_digest,
        temperature=None if temperature == 1 else temperature,
    )
    write_model(out, whole, card)
