"""A model of a run, for use elsewhere: as weights, as a program, cut to its size."""

import io
import logging
import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from fedbayes.data import FederatedData, Preprocessing, pixel_order
from fedbayes.errors import FedbayesError, FedbayesWarning, RunError
from fedbayes.experiment.build import bind_frozen, build_network, stored_data
from fedbayes.experiment.card import PROGRAM_INPUTS, Card
from fedbayes.experiment.personal import own_weights, require_global
from fedbayes.experiment.record import RunFolder, write_beside
from fedbayes.experiment.silos import WEIGHTS, writable, write_model
from fedbayes.metrics import Predictor
from fedbayes.models import CARD, PROGRAMS
from fedbayes.models.compact import compact, with_weights
from fedbayes.models.units import find_units
from fedbayes.tensors import parameter_count

FORMATS = (*WEIGHTS, *PROGRAMS)
CARD_FILE = f"{CARD}.json"
"""Name of the card among the extra files of a `.pt2`."""
TRIED = 64
"""Samples that the exported model is tried on."""
_TOLERANCE = 1e-3
"""Largest difference of log-probabilities, relative to their size, that passes for rounding."""


@dataclass(frozen=True)
class Export:
    """What was exported."""

    path: Path
    parameters: int
    """Of the model."""
    kept: int
    """Of the exported one."""
    difference: float
    """Largest difference of log-probabilities between both, on the samples that were tried."""
    tried: str = ""
    """What both were tried on; empty where the weights were written as they are."""


def export(
    folder: Path, path: Path, *, small: bool = False, client: str | int | None = None
) -> Export:
    """Write the global model of a run that has ended, or a client's own network.

    Every file has a card: what the network sees of a raw sample, names of classes and features,
    and where the model comes from (see `fedbayes.experiment.card`).

    Args:
        folder: the run folder.
        path: `.safetensors`, `.pt`, `.pth` or `.bin` for weights by name, whose network wants
            standardized samples; `.pt2` for a program that `torch.export.load` reads, or `.onnx`,
            which take raw samples.
        small: cut out the units that are all zero.
        client: name or index of a client, for its own network in place of the global one.

    Raises:
        RunError: the run has not ended, its model is not one network (an ensemble, say) but must
            be, it has no such model, or the path cannot be written.
    """
    writable(path, "the model", FORMATS)
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        _require_onnx()
    run = RunFolder(folder)
    config = run.config().model_copy(update={"device": "cpu", "precision": "float32"})
    rounds = run.best_round() or run.summary()["rounds"]
    method = config.build_method()
    if client is None:
        require_global(run, method)
        chosen, name, weights = None, "", run.model()
    else:
        chosen = run.find_client(client)
        name, weights = run.client_names()[chosen], own_weights(run, method, chosen)
    data, trouble = _data(run)
    stored = run.preprocessing()
    if stored is None and data is None:
        raise RunError(
            f"{folder} is of an older version, which kept no preprocessing, and its data are not "
            f"here: {trouble}"
        )
    preprocessing: Preprocessing = stored or data.preprocessing  # type: ignore[union-attr]
    card = Card.of(config, preprocessing, rounds, name)
    network = build_network(config, preprocessing.shape, len(preprocessing.classes))
    bind_frozen(run, network)
    weights = network.whole(weights)
    size = parameter_count(network.parameters(weights))
    if suffix in WEIGHTS and not small:
        write_model(path, weights, card)
        return Export(path, size, size, 0.0)
    if weights.keys() != network.whole(network.initial).keys():
        raise RunError(
            f"the model of {folder} ({method.name}) is not one network, as a program and --compact "
            "need; export its weights, as in -o model.safetensors"
        )
    whole = with_weights(network.module, weights)
    order = None
    if preprocessing.permuted and chosen is not None:
        order = pixel_order(config.seed, chosen, preprocessing.shape)
    raw, seen, tried = _samples(data, trouble, preprocessing, chosen)
    module = whole
    if small:
        example = seen[:1].expand(2, *seen.shape[1:])  # one sample may be all there is
        module = compact(network.module, weights, find_units(whole, example).groups, seen)
    if suffix in WEIGHTS:
        content, answer = b"", _detached(module, seen)
    else:
        program = nn.Sequential(preprocessing.module(order), module).eval()
        card = replace(card, inputs=_inputs(preprocessing, chosen is not None))
        write = _onnx if suffix == ".onnx" else _program
        content, answer = write(program, card, raw)
    difference = _difference(_detached(whole, seen)[: len(answer)], answer)
    if content:
        write_beside(path, content)
    else:
        write_model(path, module.state_dict(), card)
    if content and preprocessing.permuted and chosen is None:
        warnings.warn(
            f"clients of {preprocessing.dataset} see pixels in an order of their own; this "
            "program wants each sample in the order of its client",
            FedbayesWarning,
            stacklevel=2,
        )
    kept = sum(parameter.numel() for parameter in module.parameters())
    return Export(path, size, kept, difference, tried)


def _data(run: RunFolder) -> tuple[FederatedData | None, str]:
    """The run's data, or why there are none."""
    try:
        return stored_data(run.config(), run), ""
    except FedbayesError as error:
        return None, str(error)


def _samples(
    data: FederatedData | None, trouble: str, preprocessing: Preprocessing, client: int | None
) -> tuple[Tensor, Tensor, str]:
    """Samples to try a model on, raw and as the network sees them, and what they are."""
    if data is not None:
        start, stop = 0, data.test_total
        if client is not None:
            start, stop = (int(at) for at in data.partition.test_offsets[client : client + 2])
        stop = min(stop, start + TRIED)
        if stop > start:
            raw = data.raw_test(start, stop, permute=client is None)
            return raw, data.test_union(start, stop).x, f"{stop - start} test samples"
        trouble = "there are no test samples"
    raw = preprocessing.example(TRIED, torch.Generator().manual_seed(0))
    return raw, preprocessing.apply(raw), f"{TRIED} random inputs ({trouble})"


def _inputs(preprocessing: Preprocessing, own: bool) -> str:
    """What to say of the inputs of a program."""
    if not preprocessing.permuted:
        return PROGRAM_INPUTS
    order = "of the data set" if own else "of the client that each sample is of"
    return f"{PROGRAM_INPUTS}; pixels in the order {order}"


def _detached(predict: Predictor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return predict(x)


def _difference(one: Tensor, two: Tensor) -> float:
    """The largest difference of log-probabilities.

    Raises:
        RunError: it is more than rounding makes.
    """
    left, right = one.float().log_softmax(-1), two.float().log_softmax(-1)
    difference = float((left - right).abs().max())
    if not difference <= _TOLERANCE * max(1.0, float(left.abs().max())):
        raise RunError(
            f"the exported model would answer otherwise than the run's (log-probabilities differ "
            f"by {difference:.2g}); nothing was written"
        )
    return difference


def _program(module: nn.Module, card: Card, raw: Tensor) -> tuple[bytes, Tensor]:
    """A program of `torch.export` for batches of any size, and its answer to raw samples."""
    program = torch.export.export(module, (_example(raw),), dynamic_shapes=_any_number())
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={CARD_FILE: card.dump()})
    buffer.seek(0)
    return buffer.getvalue(), _detached(torch.export.load(buffer).module(), raw)


def _onnx(module: nn.Module, card: Card, raw: Tensor) -> tuple[bytes, Tensor]:
    """The module in ONNX, and its answer to the first raw samples."""
    from onnx.reference import ReferenceEvaluator

    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                (_example(raw),),
                dynamo=True,
                verbose=False,
                dynamic_shapes=_any_number(),
                input_names=["samples"],
                output_names=["logits"],
            )
    finally:
        log.setLevel(level)
    assert program is not None
    model = program.model_proto
    model.metadata_props.add(key=CARD, value=card.dump())
    few = raw[:4].to(torch.float32).numpy()
    (answer,) = ReferenceEvaluator(model).run(None, {"samples": few})
    return model.SerializeToString(), torch.as_tensor(answer)


def _example(raw: Tensor) -> Tensor:
    """Two samples: of one, the number might be taken for a constant."""
    return raw[:1].to(torch.float32).expand(2, *raw.shape[1:]).contiguous()


def _any_number() -> tuple[dict[int, torch.export.Dim]]:
    return ({0: torch.export.Dim("batch")},)


def _require_onnx() -> None:
    """See that what writes ONNX is installed.

    Raises:
        RunError: it is not.
    """
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        raise RunError("writing .onnx needs onnx and onnxscript: pip install 'fedbayes[onnx]'")
