"""Networks that others trained: Hugging Face `transformers` and `timm`, whole or with adapters."""

from typing import Any

import torch
from torch import Tensor, nn

from fedbayes.core import pretrained
from fedbayes.errors import FedbayesError, ModelError
from fedbayes.models.settings import ModelSettings


class TextNetwork(nn.Module):
    """A network of `transformers` for texts, as a function of their tokens.

    A sample is a row of token ids. `fedbayes.core.pretrained.PADDING` follows a text that is
    shorter: so the mask of the attention is in the sample, whichever id a tokenizer pads with.
    """

    def __init__(
        self, network: nn.Module, pad: int, vocabulary: int, absent: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self.network = network
        self.absent = absent
        """Names of parameters that are not in the files, so that their values are random."""
        self.pad = pad
        self.vocabulary = vocabulary
        """How many tokens it knows."""

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [n, length], of any type, to outputs [n, width]."""
        ids = x.long()
        answer = self.network(
            input_ids=torch.where(ids >= 0, ids, self.pad),
            attention_mask=token_mask(x).long(),
        )
        outputs: Tensor = answer.logits
        return outputs


def token_mask(x: Tensor) -> Tensor:
    """Which of the token ids [n, length] are attended to, bool: not `PADDING`; and the first one,
    since something must be, even in a text without a token.
    """
    first = torch.arange(x.shape[1], device=x.device) == 0
    return (x >= 0) | first


class LanguageNetwork(TextNetwork):
    """A language model of `transformers`, which answers for every token that counts."""

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [n, length], of any type, to logits [tokens that count, vocabulary]."""
        return super().forward(x)[token_mask(x)]


class ImageNetwork(nn.Module):
    """A network of `transformers` for images, as a function of pixels."""

    def __init__(self, network: nn.Module, absent: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.network = network
        self.absent = absent
        """As in `TextNetwork`."""

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, channels, height, width] to outputs [n, width]."""
        outputs: Tensor = self.network(pixel_values=x).logits
        return outputs


def build_other(settings: ModelSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A pretrained network with a head of this width; the settings choose its trainable part.

    Args:
        settings: the `[model]` table.
        shape: of one sample: (length,) of tokens, (channels, height, width) of images.
        outputs: width of the last layer.

    Raises:
        ModelError: there is no such network here or on the hub, it is for other samples, or layers
            that are to get adapters are not found.
    """
    assert settings.pretrained is not None
    make = _timm if settings.name == "timm" else _transformers
    network, head, wrapped = make(settings, shape, outputs)
    if settings.trains == "lora":
        _add_adapters(network, settings)
    if settings.trains != "all":
        for name, parameter in network.named_parameters():
            adapter = ".lora_" in name and not (settings.lora_trains == "b" and ".lora_A." in name)
            parameter.requires_grad_(adapter or name in head)
    return wrapped


def _transformers(
    settings: ModelSettings, shape: tuple[int, ...], outputs: int
) -> tuple[nn.Module, frozenset[str], nn.Module]:
    """The network, names of its head's parameters, and the module that takes samples."""
    pretrained.require("transformers", "model 'transformers'", ModelError)
    import transformers

    name = str(settings.pretrained)

    def configure(place: str, **options: Any) -> Any:
        return transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **options)

    config = pretrained.load("the network", name, configure, ModelError)
    task = _task(settings, config)
    _check_shape(task, config, shape, name)
    config.num_labels = outputs
    kind: Any = (
        transformers.AutoModelForSequenceClassification
        if task == "sequence-classification"
        else transformers.AutoModelForImageClassification
    )

    def loader(place: str, **options: Any) -> Any:
        return kind.from_pretrained(
            place,
            config=config,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )

    absent: frozenset[str] = frozenset()
    if settings.scratch:
        network = kind.from_config(config).float()
    else:
        network, about = pretrained.load("the network", name, loader, ModelError)
        absent = frozenset(about["missing_keys"]) | {n for n, *_ in about["mismatched_keys"]}
    body = f"{network.base_model_prefix}."
    head = frozenset(n for n, _ in network.named_parameters() if not n.startswith(body))
    if task == "image-classification":
        return network, head, ImageNetwork(network, absent)
    pad = config.get_text_config().pad_token_id
    if pad is None:  # the last token of a text is found by it
        network.config.pad_token_id = pad = 0
    return network, head, TextNetwork(network, pad, config.get_text_config().vocab_size, absent)


def _task(settings: ModelSettings, config: Any) -> str:
    """What a network of transformers is for."""
    from transformers.models.auto import modeling_auto

    offered = {
        "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    }
    able = [task for task, kinds in offered.items() if type(config) in kinds]
    if settings.task != "auto" and settings.task not in able:
        raise ModelError(
            f"{settings.pretrained} is a {config.model_type}, which transformers supports for "
            f"{' and '.join(able) or 'neither'}, but model.task is {settings.task!r}"
        )
    if settings.task == "auto" and len(able) != 1:
        raise ModelError(
            f"{settings.pretrained} is a {config.model_type}, which transformers supports for "
            f"{'both of' if able else 'none of'} {' and '.join(offered)}; "
            + ("choose one with model.task" if able else "choose another network")
        )
    return able[0] if settings.task == "auto" else settings.task


def _check_shape(task: str, config: Any, shape: tuple[int, ...], name: str) -> None:
    """See that samples are what a network takes, as far as its configuration tells."""
    if task == "sequence-classification":
        if len(shape) != 1:
            raise ModelError(
                f"{name} takes texts, but a sample of this data has shape {shape}. Set "
                "data.tokens to the column of texts"
            )
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        if most is not None and shape[0] > most:
            raise ModelError(
                f"{name} takes texts of at most {most} tokens, but data.max_tokens is {shape[0]}. "
                f"Set it to {most} or less"
            )
        return
    if len(shape) != 3:
        raise ModelError(f"{name} takes images, but a sample of this data has shape {shape}")
    channels, side = getattr(config, "num_channels", None), getattr(config, "image_size", None)
    sides = (side, side) if isinstance(side, int) else side
    if channels not in (None, shape[0]) or (sides and tuple(sides) != shape[1:]):
        wanted = (channels or shape[0], *(sides or shape[1:]))
        raise ModelError(
            f"{name} takes images of {' x '.join(map(str, wanted))} (channels, height, width), "
            f"but this data has {' x '.join(map(str, shape))}. Set data.processor for images from "
            "files, or set data.size"
        )


def language_model(
    name: str, error: type[FedbayesError], kind: str = ""
) -> tuple[LanguageNetwork, bool] | None:
    """The language model of a pretrained network, and whether it is causal; None if it has none.

    Args:
        name: of the network on the hub, or its folder.
        error: class of errors to be raised.
        kind: `causal` or `masked`; either by default.

    Raises:
        FedbayesError: of the given class; it cannot be loaded.
    """
    pretrained.require("transformers", "texts", error)
    import transformers
    from transformers.models.auto import modeling_auto

    def configure(place: str, **options: Any) -> Any:
        return transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **options)

    config = pretrained.load("the network", name, configure, error)
    kinds: list[tuple[str, Any, Any]] = [
        (
            "masked",
            modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
            transformers.AutoModelForMaskedLM,
        ),
        (
            "causal",
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
            transformers.AutoModelForCausalLM,
        ),
    ]
    for word, known, loads in kinds:
        if type(config) not in known or (kind and kind != word):
            continue

        def loader(place: str, loads: Any = loads, **options: Any) -> Any:
            return loads.from_pretrained(
                place,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
                **options,
            )

        found, about = pretrained.load("the language model", name, loader, error)
        if about["missing_keys"]:  # its head is not in the files: its weights are random
            continue
        text = config.get_text_config()
        pad = 0 if text.pad_token_id is None else text.pad_token_id
        return LanguageNetwork(found.eval(), pad, text.vocab_size), word == "causal"
    return None


def _timm(
    settings: ModelSettings, shape: tuple[int, ...], outputs: int
) -> tuple[nn.Module, frozenset[str], nn.Module]:
    """The network, names of its head's parameters, and the module that takes samples."""
    pretrained.require("timm", "model 'timm'", ModelError)
    import timm

    name = str(settings.pretrained)
    if len(shape) != 3:
        raise ModelError(f"{name} takes images, but a sample of this data has shape {shape}")
    pretrained.require_timm_name(name, ModelError)

    def make(place: str, **options: Any) -> nn.Module:
        made: nn.Module = timm.create_model(
            place, pretrained=not settings.scratch, num_classes=outputs, in_chans=shape[0]
        )
        return made

    if settings.scratch:
        network = make(name)
    else:
        network = pretrained.load("the network", name, make, ModelError)
    inside = {id(p) for p in _parameters(network.get_classifier())}  # type: ignore[operator]
    head = frozenset(n for n, p in network.named_parameters() if id(p) in inside)
    return network, head, network


def _parameters(heads: Any) -> list[nn.Parameter]:
    """Of a head, or of several."""
    several = heads if isinstance(heads, tuple | list) else [heads]
    return [parameter for one in several for parameter in one.parameters()]


def _add_adapters(network: nn.Module, settings: ModelSettings) -> None:
    """Put low-rank adapters next to layers of a network, in place."""
    pretrained.require("peft", "model.trains = 'lora'", ModelError)
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules=list(settings.lora_targets) or None,
    )
    try:
        inject_adapter_in_model(config, network)
    except ValueError as error:
        raise ModelError(_no_targets(network, settings, error)) from error


def _no_targets(network: nn.Module, settings: ModelSettings, error: Exception) -> str:
    linear = [n for n, layer in network.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    endings = list(dict.fromkeys(_ending(name) for name in linear))
    shown = ", ".join(endings[:12]) + (", …" if len(endings) > 12 else "")
    if settings.lora_targets:
        reason = f"no layers of {settings.pretrained} end in {', '.join(settings.lora_targets)}"
    else:
        reason = f"peft has no layers to adapt for {settings.pretrained} ({error})"
    return f"{reason}. Set model.lora_targets to some of {shown}"


def _ending(name: str) -> str:
    """The last part of a layer's name that is no number."""
    parts = [part for part in name.split(".") if not part.isdecimal()]
    return parts[-1] if parts else name
