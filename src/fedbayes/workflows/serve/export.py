"""A model of a run, for use elsewhere: as weights, as a program, cut to its size."""

import io
import logging
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from fedbayes.contracts import AnyMethod, Federation
from fedbayes.core.brief import Brief
from fedbayes.core.files import writable, write_beside
from fedbayes.core.tensors import Tensors, parameter_count
from fedbayes.data import FederatedData, Preprocessing, pixel_order
from fedbayes.data.dataset import Rows
from fedbayes.errors import FedbayesError, RunError, require_extra, warn
from fedbayes.likelihoods import Classes, Likelihood, Predictor, predictor
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.temperature import at_temperature
from fedbayes.models import CARD, PROGRAMS
from fedbayes.models.compact import compact
from fedbayes.models.resize import with_weights
from fedbayes.models.units import find_units
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.runs.personal import counts_of, own_weights, require_global, temperature_of
from fedbayes.storage.calibrations import (
    CONFORMAL,
    HAZARDS,
    CalibrationKind,
    read_calibration,
)
from fedbayes.storage.card import PROGRAM_INPUTS, Card, program_inputs, program_outputs
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.serve.model_card import facts, measured, write_cards
from fedbayes.workflows.serve.model_files import WEIGHTS, write_model

FORMATS = (*WEIGHTS, *PROGRAMS)
CARD_FILE = f"{CARD}.json"
"""Name of the card among the extra files of a `.pt2`."""
TRIED = 64
"""Samples that the exported model is tried on."""
_TOLERANCE = 1e-3
"""Largest difference of predictions, relative to their size, that passes for rounding."""


@dataclass(frozen=True, repr=False)
class Export(Brief):
    """A file that `export` wrote, and what it holds."""

    path: Path
    parameters: int
    """Of the model."""
    kept: int
    """Of the exported one."""
    difference: float
    """Largest difference between what both predict, on the samples that were tried: of
    log-probabilities, or of means in units of the target's std."""
    tried: str = ""
    """What both were tried on; empty where the weights were written as they are."""
    cards: tuple[Path, ...] = ()
    """What goes with a program: its card as JSON and as Markdown."""
    expects: str = ""
    """What a program takes, in words; empty for weights."""


def export(
    folder: Path, path: Path, *, small: bool = False, client: str | int | None = None
) -> Export:
    """Write the global model of a run that has ended, or a client's own network.

    Every file has a card: what the network sees of a raw sample, names of classes and features,
    and where the model comes from (see `fedbayes.storage.card`). A program has two more files next
    to it, for people and programs that serve it: `m.pt2.card.md` and `m.pt2.card.json`. They
    describe its data, clients, metrics, calibration and privacy (see
    `fedbayes.workflows.serve.model_card`).

    Args:
        folder: the run folder.
        path: `.safetensors`, `.pt`, `.pth` or `.bin` for weights by name, whose network wants
            standardized samples; `.pt2` for a program that `torch.export.load` reads, or `.onnx`,
            which take raw samples.
        small: cut out the units that are all zero.
        client: name or index of a client, for its own network instead of the global one.

    Raises:
        RunError: the run has not ended, it has no such model, or its model must be one network but
            is not (an ensemble, say). Or the path cannot be written, or is a file of the run's own.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.workflows.serve.export import export
        >>> result = fedbayes.run(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}, out="exported"
        ... )
        >>> export(Path("exported"), Path("model.safetensors")).parameters
        610
    """
    run = RunFolder(folder)
    writable(path, "the model", FORMATS, [run.model_file, *folder.glob("start.*")])
    suffix = path.suffix.lower()
    require_format(path)
    source = _Source.open(run, client)
    network, likelihood = source.run.network, source.run.likelihood
    weights = network.whole(source.model)
    size = parameter_count(network.parameters(weights))
    if suffix in WEIGHTS and source.card.counts is not None:
        warn(
            f"{path.name} has the client's number of samples of each class, for fedbayes fuse. A "
            "run with method.class_shares = false leaves it out"
        )
    if suffix in WEIGHTS and not small:
        write_model(path, weights, source.card)
        return Export(path, size, size, 0.0)
    if weights.keys() != network.start.keys():
        raise RunError(
            f"the model of {folder} ({source.method.name}) is not a single network, which a "
            "program and --compact need. Export its weights, as in -o model.safetensors"
        )
    module = whole = with_weights(network.module, weights)
    raw, seen, tried = source.samples()
    if small:
        example = seen[:1].expand(2, *seen.shape[1:])  # one sample may be all there is
        module = compact(network.module, weights, find_units(whole, example).groups, seen)
    card, content, answer = source.card, b"", Tensor()
    inside = None if suffix in WEIGHTS or card.conformal is not None else card.temperature
    if suffix in WEIGHTS:
        answer = _detached(_answering(module, likelihood), seen)
    else:
        card, content, answer = source.program(path, _answering(module, likelihood, inside), raw)
    wanted = _detached(_answering(whole, likelihood, inside), seen)
    difference = _difference(wanted[: len(answer)], answer, likelihood)
    left = sum(parameter.numel() for parameter in module.parameters())
    if not content:
        write_model(path, module.state_dict(), card)
        return Export(path, size, left, difference, tried)
    write_beside(path, content)
    cards = source.cards(path, card, left)
    return Export(path, size, left, difference, tried, cards, card.expects)


@dataclass(frozen=True)
class _Source:
    """A run that has ended, and which of its models is exported."""

    folder: RunFolder
    method: AnyMethod
    client: int | None
    """Whose own network it is; None: the global model."""
    data: FederatedData | None
    trouble: str
    """Why there are no data."""
    run: Federation
    model: Tensors
    card: Card
    """Of a file of weights."""
    order: Rows | None
    """In which the client sees pixels, if they have one of their own."""

    @classmethod
    def open(cls, run: RunFolder, client: str | int | None) -> Self:
        """Arguments and errors as for `export`."""
        run.require_run()
        rounds = run.best_round() or run.summary()["rounds"]
        run.refuse_changed_config()  # before anything that it names is imported
        config = run.config().on("cpu").model_copy(update={"precision": "float32"})
        method = config.build_method()
        chosen, name = None, ""
        if client is None:
            require_global(run, method)
        else:
            chosen = run.find_client(client)
            name = run.client_names()[chosen]
        data, trouble = _data(run)
        stored = run.preprocessing()
        if stored is None and data is None:
            raise RunError(
                f"{run.path} is from an older version without stored preprocessing, and its data "
                f"are not available: {trouble}"
            )
        seen: Preprocessing = stored or data.preprocessing  # type: ignore[union-attr]
        card = replace(
            Card.of(config, seen, rounds, name),
            temperature=temperature_of(run, chosen),
            counts=None if chosen is None else counts_of(run, chosen),
            conformal=_calibration(CONFORMAL, run, name),
            hazards=_calibration(HAZARDS, run, name),
        )
        kept = stored_run(run, config, seen)
        model = run.model() if chosen is None else own_weights(run, method, kept, chosen)
        order = None
        if seen.permuted and chosen is not None:
            order = pixel_order(config.seed, chosen, seen.shape)
        return cls(run, method, chosen, data, trouble, kept, model, card, order)

    def samples(self) -> tuple[Tensor, Tensor, str]:
        """Samples to try a model on, raw and as the network sees them, and what they are."""
        trouble, data, seen = self.trouble, self.data, self.card.preprocessing
        if data is not None:
            start, stop = 0, data.test_total
            if self.client is not None:
                start, stop = data.test_range(self.client)
            stop = min(stop, start + TRIED)
            if stop > start:
                raw = data.raw_test(start, stop, permute=self.client is None)
                return raw, data.test_union(start, stop).x, f"{stop - start} test samples"
            trouble = "there are no test samples"
        raw = seen.example(TRIED, torch.Generator().manual_seed(0))
        return raw, seen.apply(raw), f"{TRIED} random inputs ({trouble})"

    def program(self, path: Path, answering: nn.Module, raw: Tensor) -> tuple[Card, bytes, Tensor]:
        """A program of raw samples: its card, its file, and what it answers.

        Args:
            path: the file, of a format of programs.
            answering: what it computes of standardized samples.
            raw: samples to record it on.
        """
        card, seen = replace(self.card, counts=None), self.card.preprocessing
        outputs = program_outputs(self.run.likelihood)
        if card.conformal is not None and card.temperature is not None:
            warn(
                f"{path.name} has a conformal threshold for probabilities without the temperature "
                f"{card.temperature:.4g}. fedbayes predict applies the temperature; elsewhere, "
                "divide the logits by it"
            )
        elif card.temperature is not None:
            outputs += f"; at the temperature {card.temperature:.4g} of its calibration"
            card = replace(card, temperature=None)
        if seen.permuted and self.client is None:
            warn(
                f"clients of {seen.dataset} have different pixel orders. This program needs each "
                "sample in the order of its client"
            )
        onnx = path.suffix.lower() == ".onnx"
        standardize = seen.module(self.order, checked=not onnx and _within(raw, self.card))
        card = replace(card, inputs=_inputs(seen, self.client is not None), outputs=outputs)
        program = nn.Sequential(standardize, answering).eval()
        return card, *(_onnx if onnx else _program)(program, card, raw)

    def cards(self, path: Path, card: Card, parameters: int) -> tuple[Path, ...]:
        """Write the cards next to a program with this number of parameters."""
        draws = self.method.draws(self.model, self.run)
        told = facts(
            card,
            self.folder.summary(),
            path.name,
            parameters=parameters,
            results=measured(self.run, draws, self.data, self.client, self.card.temperature),
            conformal=card.conformal,
            clients=self.folder.client_names(),
        )
        return write_cards(path, told)


def require_format(path: Path) -> None:
    """See that a model can be written in the format of a path.

    Raises:
        RunError: it is `.onnx`, and the packages for it are not installed.
    """
    if path.suffix.lower() == ".onnx":
        require_extra("onnx", "writing .onnx", RunError, "onnx", "onnxscript")


Found = TypeVar("Found")


def _calibration(kind: CalibrationKind[Found], run: RunFolder, client: str) -> Found | None:
    """What calibrates the model; of a client's own one only what is of its rows."""
    if not client:
        return read_calibration(kind, run)
    try:
        return read_calibration(kind, run, client, personal=True)
    except RunError as error:
        warn(str(error))
        return None


def _answering(
    network: nn.Module, likelihood: Likelihood, temperature: float | None = None
) -> nn.Module:
    """A module that gives what a network predicts, at a temperature if there is one."""
    if temperature is not None:
        network = nn.Sequential(network, _Tempered(likelihood, temperature)).eval()
    if isinstance(likelihood, Categorical):
        return network
    return nn.Sequential(network, _Answer(likelihood)).eval()


class _Tempered(nn.Module):
    """Outputs of a network to those at a temperature."""

    def __init__(self, likelihood: Likelihood, temperature: float) -> None:
        super().__init__()
        self._likelihood, self._temperature = likelihood, temperature

    def forward(self, f: Tensor) -> Tensor:
        """[n, width] to [n, width]."""
        return at_temperature(self._likelihood, f[None], self._temperature)[0]


class _Answer(nn.Module):
    """Outputs of a network to log-probabilities, or means in the unit of the target."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self._predict = predictor(likelihood, lambda f: f[None])

    def forward(self, f: Tensor) -> Tensor:
        """[n, width] to [n, classes] or [n, columns]."""
        return self._predict(f)


def _data(run: RunFolder) -> tuple[FederatedData | None, str]:
    """The run's data, or why there are none."""
    try:
        return stored_data(run.config(), run), ""
    except FedbayesError as error:
        return None, str(error)


def _inputs(preprocessing: Preprocessing, own: bool) -> str:
    """What to say of the inputs of a program."""
    if not preprocessing.permuted:
        return program_inputs(preprocessing)
    order = "of the data set" if own else "of the client of each sample"
    return f"{PROGRAM_INPUTS}; pixels in the order {order}"


def _detached(predict: Predictor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return predict(x)


def _within(raw: Tensor, card: Card) -> bool:
    """Whether the samples that a program is tried on are in the range of raw images."""
    bounds = card.preprocessing.raw_range
    return bounds is None or bool(((raw >= bounds[0]) & (raw <= bounds[1]) | raw.isnan()).all())


def _difference(one: Tensor, two: Tensor, likelihood: Likelihood) -> float:
    """The largest difference of log-probabilities, or of means in units of the target's std."""
    what, rounding = "log-probabilities differ by", 0.0
    if isinstance(likelihood, Classes):
        left, right = one.float().log_softmax(-1), two.float().log_softmax(-1)
    else:
        what, target = "predictions differ by", likelihood.target
        scale = torch.tensor(target.scale or (1.0,), dtype=torch.float64)
        center = torch.tensor(target.center if target.scale else (0.0,), dtype=torch.float64)
        left, right = ((mean.double() - center) / scale for mean in (one, two))
        # Far from zero, single numbers are coarse.
        rounding = 8 * torch.finfo(torch.float32).eps * float((center / scale).abs().max())
        what += " standard deviations" if target.scale else ""
    difference = float((left - right).abs().max())
    if not difference <= _TOLERANCE * max(1.0, float(left.abs().max())) + rounding:
        raise RunError(
            f"the exported model would differ from the run's ({what} {difference:.2g}), so "
            "nothing was written"
        )
    return difference


def program_file(
    path: Path,
    network: nn.Module,
    preprocessing: Preprocessing,
    likelihood: Likelihood,
    card: Card,
    raw: Tensor,
) -> bytes:
    """The content of a file: a program that takes raw samples and needs no fedbayes.

    Args:
        path: the file, `.pt2` or `.onnx`.
        network: of samples as it sees them.
        preprocessing: how that is.
        likelihood: what its outputs mean.
        card: what the file says of it.
        raw: samples to try it on.

    Raises:
        RunError: the program would answer otherwise, or the network has no such program.
    """
    answering, onnx = _answering(network, likelihood), path.suffix.lower() == ".onnx"
    program = nn.Sequential(preprocessing.module(None, checked=not onnx), answering).eval()
    content, answer = (_onnx if onnx else _program)(program, card, raw)
    _difference(_detached(answering, preprocessing.apply(raw))[: len(answer)], answer, likelihood)
    return content


def _program(module: nn.Module, card: Card, raw: Tensor) -> tuple[bytes, Tensor]:
    """A program of `torch.export` for batches of any size, and its answer to raw samples."""
    with warnings.catch_warnings():
        # Of attributes that need no buffer, and of constants that are parts of one tensor.
        warnings.simplefilter("ignore", UserWarning)
        program = torch.export.export(module, (_example(raw),), dynamic_shapes=_any_number())
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={CARD_FILE: card.dump()})
    buffer.seek(0)
    return buffer.getvalue(), _detached(torch.export.load(buffer).module(), raw)


def _onnx(module: nn.Module, card: Card, raw: Tensor) -> tuple[bytes, Tensor]:
    """The module in ONNX, and its answer to the first raw samples."""
    from onnx.reference import ReferenceEvaluator

    answer = "logits" if isinstance(card.likelihood, Categorical) else "predictions"
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
                output_names=[answer],
            )
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # of its exporter
        raise RunError("PyTorch finds no ONNX form of the network. Write a .pt2 program") from error
    finally:
        log.setLevel(level)
    assert program is not None
    model = program.model_proto
    model.metadata_props.add(key=CARD, value=card.dump())
    few = raw[:4].to(torch.float32).numpy()
    (found,) = ReferenceEvaluator(model).run(None, {"samples": few})
    return model.SerializeToString(), torch.as_tensor(found)


def _example(raw: Tensor) -> Tensor:
    """Two samples: of one, the number might be taken for a constant."""
    return raw[:1].to(torch.float32).expand(2, *raw.shape[1:]).contiguous()


def _any_number() -> tuple[dict[int, torch.export.Dim]]:
    return ({0: torch.export.Dim("batch")},)
