"""Fusion in function space, from files to files: network, report, pictures."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedbayes.core.files import write_beside
from fedbayes.core.tensors import Samples
from fedbayes.core.wording import listed
from fedbayes.data import Preprocessing
from fedbayes.errors import ConfigError, ModelError, warn
from fedbayes.fusion.distillation import DistillationProgress
from fedbayes.fusion.draws import CHUNK, CachedInputs
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.function import (
    FunctionFusion,
    HeldOut,
    fuse_functions,
    teacher_of,
)
from fedbayes.fusion.laplace import LastLayer
from fedbayes.fusion.norm_matching import norm_matched
from fedbayes.fusion.regression import WHOLE
from fedbayes.fusion.settings import FunctionSettings
from fedbayes.fusion.temperature import TemperatureScaled, own_temperature
from fedbayes.inputs import InputPrior, Inputs, Sums, build_prior, plot_inputs
from fedbayes.inputs.picture import require_picture
from fedbayes.inputs.samples import RealSamples
from fedbayes.inputs.spectra import Spectra
from fedbayes.inputs.text_sums import prior_by_sums
from fedbayes.inputs.texts import text_inputs
from fedbayes.likelihoods.temperature import has_temperature
from fedbayes.models import PROGRAMS, ModelSettings
from fedbayes.models.units import require_functions
from fedbayes.storage.card import Card, program_inputs, program_outputs
from fedbayes.workflows.fuse.client_models import ClientModels
from fedbayes.workflows.fuse.client_sums import spectra_of_clients, sums_of_clients
from fedbayes.workflows.fuse.frontier import (
    FrontierPoint,
    SizeTradeoff,
    multiplications,
    plot_frontier,
)
from fedbayes.workflows.fuse.function_settings import function_settings
from fedbayes.workflows.fuse.fusion_report import PAGES, FusionResult, told, write_report
from fedbayes.workflows.fuse.job import Fused, FusionJob
from fedbayes.workflows.fuse.posterior_files import (
    FROM_FILES,
    is_posterior,
    sent_counts,
    sent_temperatures,
)
from fedbayes.workflows.serve.export import program_file
from fedbayes.workflows.serve.model_files import (
    ModelFiles,
    read_counts,
    read_samples,
    write_model,
)
from fedbayes.workflows.serve.output_order import other_order

UNTOLD = "samples in the form that the fused networks expect"
"""What a program takes where nobody said how samples were scaled."""
WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""That are tried where the width is free."""
_PACED = 8
"""Steps of training end to end after which the time left is believed."""
_LONG = 1800
"""Seconds from which on training end to end is warned about."""
BOUND = 0.05
"""KL divergence to the teacher in nats, on held-out draws."""


_CLASSES = (
    "outputs are read as logits of {0} classes, as --classes {0} would say. Networks that predict "
    "numbers need cards, as files of fedbayes have them"
)


def fuse_networks(
    job: FusionJob,
    name: str,
    watch: Callable[[str], None],
    progress: Callable[[DistillationProgress], object],
) -> Fused:
    """Fuse in function space; arguments and errors as for `FusionJob.run`."""
    if job.state is not None and job.minutes == 0:
        raise ConfigError("--state has no effect with --minutes 0: there is no training to keep")
    if job.bound is not None and job.width != "free":
        raise ConfigError("--bound works only with --width free")
    settings = function_settings(job.settings, job.minutes, job.posterior)
    if job.minutes is None:
        progress = _long_told(progress)
    return told(NetworkFusion(job, settings).run(watch, progress), job)


def _long_told(
    progress: Callable[[DistillationProgress], object],
) -> Callable[[DistillationProgress], None]:
    """The same, with one warning if training end to end is going to take long."""
    warned = False

    def tell(at: DistillationProgress) -> None:
        nonlocal warned
        if not warned and at.step >= _PACED and at.left > _LONG:
            warned = True
            warn(
                f"training end to end is going to take {at.left / 3600:.1f} hours. --minutes "
                "bounds it, and with --state FILE it can be stopped and resumed"
            )
        progress(at)

    return tell


@dataclass(frozen=True)
class NetworkFusion:
    """A fusion of networks in function space; `fedbayes fuse --method function`."""

    job: FusionJob
    settings: FunctionSettings

    @property
    def width(self) -> float | None:
        """In that of `like`; None: the least within the bound."""
        width = self.job.width
        return None if width == "free" else 1.0 if width is None else width

    @property
    def bound(self) -> float:
        """The largest KL divergence to the teacher, in nats, that a free width may end at."""
        return BOUND if self.job.bound is None else self.job.bound

    def run(
        self,
        watch: Callable[[str], None],
        progress: Callable[[DistillationProgress], object],
    ) -> "FusionResult":
        """Read, fuse and write; nothing is written unless all went well."""
        job, widths = self.job, self._widths()
        silos = job.silos()
        self._check_form(silos)
        prior, inputs = drawn(silos, job.inputs or "auto", job.sums, job.seed)
        if job.show_inputs is not None:
            require_picture(prior.shape)
        counts, notes = counts_of(job.counts, job.models, silos, job.files)
        if counts is not None and counts.shape[1] == 1:
            counts = counts[:, 0]
        test, short = self._samples(job.test, silos), silos.short
        networks = {short[path]: network for path, network in silos.networks.items()}
        temperatures = self._temperatures(silos, counts)
        cached = CachedInputs(inputs)
        require_functions(networks, cached.batch(-1, CHUNK)[:2])
        teacher, samples = teacher_of(
            networks, counts, silos.likelihood, temperatures, cached, self.settings.mirrored
        )
        if has_temperature(silos.likelihood):
            notes = (*notes, teacher.told)
        matched = norm_matched(teacher, cached, samples, self.settings)
        held_out = HeldOut(teacher, matched)
        if silos.card is None:
            _doubt_order(list(networks), held_out)
            if counts is None and job.classes is None:
                notes = (*notes, _CLASSES.format(silos.likelihood.outputs))
        scale = SizeTradeoff(held_out, test)
        fusions: dict[float, FunctionFusion] = {}
        for width in widths:
            fusions[width] = fuse_functions(
                networks,
                silos.like,
                matched,
                counts=counts,
                temperatures=temperatures,
                likelihood=silos.likelihood,
                widths=width,
                settings=self.settings,
                held_out=held_out,
                state=job.state,
                watch=partial(_say, watch, f"width {width:g}: " if len(widths) > 1 else ""),
                progress=progress,
            )
            if self.width is None and not job.frontier and self._within(fusions[width]):
                break
        chosen = self._chosen(fusions)
        outcome = FusionResult(
            fusions[chosen],
            chosen,
            prior,
            silos,
            inputs,
            self._marks(scale, fusions, silos, networks, counts, watch),
            self._trust(fusions[chosen], scale),
            self._sent(counts, temperatures),
            (
                *notes,
                *prior.notes,
                *self.job.some_sums,
                *(f"width {w:g}: {n}" for w, f in fusions.items() if w != chosen for n in f.notes),
                *_cost(fusions[chosen], scale.example),
                *self._doubts(fusions[chosen], prior),
            ),
        )
        return replace(outcome, expects=self._write(outcome, silos))

    def _samples(self, path: Path | None, silos: ClientModels) -> Samples | None:
        """Labelled samples of a file, as the networks see them."""
        if path is None:
            return None
        seen = silos.preprocessing
        return read_samples(path, seen, seen.target, unit=silos.card is None)

    def _temperatures(
        self, silos: ClientModels, counts: npt.NDArray[np.int64] | None
    ) -> list[float | None]:
        """Of each model: fitted to the file of `temperature_data`, or as its own file says."""
        job, kind = self.job, silos.likelihood
        samples = self._samples(job.temperature_data, silos)
        if not has_temperature(kind):
            if samples is not None:
                raise ModelError(
                    f"--temperature-data has no effect: models of the likelihood {kind.name} have "
                    "no temperature. Leave it out"
                )
            return [None] * len(job.models)
        if samples is None:
            return sent_temperatures(job.models, job.files)
        rows = counts if counts is not None and counts.ndim == 2 else [None] * len(job.models)
        networks = map(frozen, silos.networks.values())
        return [own_temperature(n, kind, samples, c) for n, c in zip(networks, rows, strict=True)]

    def _marks(
        self,
        scale: SizeTradeoff,
        fusions: Mapping[float, FunctionFusion],
        silos: ClientModels,
        networks: Mapping[str, nn.Module],
        counts: npt.NDArray[np.int64] | None,
        watch: Callable[[str], None],
    ) -> list[FrontierPoint]:
        """What all widths and the clients' networks are worth; none where nobody asked."""
        job = self.job
        page = job.report is not None and job.report.suffix.lower() in PAGES
        shown = bool(job.frontier) or job.picture is not None or page
        if len(fusions) == 1 and scale.test is None and not shown:
            return []
        watch("comparing")
        sizes = None if counts is None else counts.reshape(len(networks), -1).sum(1).tolist()
        return [
            *(
                scale.fused(found, width, self._answering(found, silos))
                for width, found in fusions.items()
            ),
            *scale.clients(networks, sizes),
        ]

    def _sent(
        self, counts: npt.NDArray[np.int64] | None, temperatures: Sequence[float | None]
    ) -> tuple[str, ...]:
        """What clients sent, in words."""
        job = self.job
        sent = {
            "their weights": True,
            "counts of samples": counts is not None,
            "temperatures": any(temperatures) and job.temperature_data is None,
            "sums over their data": bool(job.sums),
            "curvatures of their weights, which are not used": all(map(is_posterior, job.models)),
        }
        return tuple(what for what, given in sent.items() if given)

    def _doubts(self, fusion: FunctionFusion, prior: InputPrior) -> tuple[str, ...]:
        """What to say of scores that may not be those of real samples."""
        if self.job.test is not None or isinstance(prior, RealSamples):
            return ()
        found = []
        if self.job.inputs in (None, "auto") and not self.job.sums:
            found.append(f"the inputs ({prior.name}) are a guess from their shape")
        if any(note.startswith(WHOLE) for note in fusion.notes):
            found.append("layers were copied whole from one client")
        if not found:
            return ()
        return (
            f"warning: the scores are on synthetic inputs only, and {' and '.join(found)}: on "
            "real samples the fused network may be far worse. Score it on real samples with "
            "--test; --inputs (a file or module:function) and --sums give more realistic inputs",
        )

    def _trust(self, fusion: FunctionFusion, scale: SizeTradeoff) -> dict[str, dict[str, float]]:
        """Metrics on test samples of the network as it is, with a temperature, with a posterior."""
        found = fusion.calibration
        if found is None or scale.test is None:
            return {}
        ways = {"network": fusion.module, "temperature": found.cooled, "posterior": found.module}
        return {way: scale.metrics(frozen(network)) for way, network in ways.items()}

    def _widths(self) -> list[float]:
        """The widths that are tried, narrow to wide."""
        if self.width is None:
            widths = list(self.job.frontier) or list(WIDTHS)
        else:
            widths = [*self.job.frontier, self.width]
        if not all(math.isfinite(width) and width > 0 for width in widths):
            raise ConfigError(
                f"widths must be above 0, such as 1 or 0.5; got {listed(f'{w:g}' for w in widths)}"
            )
        if self.job.state is not None and len(set(widths)) > 1:
            raise ConfigError("--state works with one width. Leave out --state or --frontier")
        return sorted(set(widths))

    def _within(self, fusion: FunctionFusion) -> bool:
        return fusion.likeness.divergence <= self.bound

    def _chosen(self, fusions: Mapping[float, FunctionFusion]) -> float:
        """The width that is written: as given, or the narrowest within the bound."""
        if self.width is not None:
            return self.width
        for width, fusion in fusions.items():
            if self._within(fusion):
                return width
        width, nearest = min(fusions.items(), key=lambda item: item[1].likeness.divergence)
        raise ModelError(
            f"no width up to {max(fusions):g} is within {self.bound:g} nats of the ensemble; the "
            f"nearest is {width:g} with {nearest.likeness.divergence:.3g}. Increase --bound or "
            "--minutes, or try wider networks with --frontier"
        )

    def _check_form(self, silos: ClientModels) -> None:
        """See that what comes out can be written in the form that was asked for."""
        if self.job.out.suffix.lower() in PROGRAMS:
            onnx = self.job.out.suffix.lower() == ".onnx"
            if onnx and self.settings.posterior == "kronecker":
                raise ModelError(
                    "a posterior of all layers has no ONNX form. Write a .pt2 program, or set "
                    "--posterior last-layer"
                )
            require_onnx(self.job.out, silos)
            return
        program = f"write a program, as in -o {self.job.out.with_suffix(PROGRAMS[0])}"
        if self.settings.posterior is not None:
            raise ModelError(f"a file of weights cannot store a posterior: {program}")
        if silos.programs and silos.settings is None:
            raise ModelError(f"weights of a program fit no network: {program}")
        if self.width != 1 and not silos.dense:
            raise ModelError(
                f"weights of another width fit no known network: {program}, or leave the width at 1"
            )

    def _answering(self, fusion: FunctionFusion, silos: ClientModels) -> nn.Module | None:
        """The network with its posterior or temperature, where what is written has one."""
        if fusion.calibration is not None:
            return fusion.calibration.module
        said = silos.told or self.job.out.suffix.lower() in PROGRAMS
        if fusion.temperature == 1 or not said:
            return None
        return TemperatureScaled(fusion.module, fusion.temperature).eval()

    def _write(self, outcome: "FusionResult", silos: ClientModels) -> str:
        """Write all files; what a user of the network should know, in words."""
        fusion, prior, found = outcome.fusion, outcome.prior, outcome.fusion.calibration
        method = {"name": "fuse function", "inputs": prior.name}
        answering = self._answering(fusion, silos)
        if found is not None:
            method["posterior"] = str(self.settings.posterior)
        warmth = fusion.temperature
        expects = write_network(self.job.out, fusion.module, silos, method, answering, warmth)
        if self.job.show_inputs is not None:
            plot_inputs(prior, self.job.show_inputs, seed=self.job.seed)
        if self.job.picture is not None:
            plot_frontier(outcome.marks, self.job.picture)
        if self.job.report is not None:
            write_report(outcome, self.job.report)
        return expects


def _doubt_order(names: Sequence[str], held_out: HeldOut) -> None:
    """Print a warning if a network seems to have its classes in another order than the first.

    Files without cards do not name their classes, so that output k is the same class in all.
    """
    likelihood = held_out.likelihood
    if not likelihood.target.classes:
        return
    says = [likelihood.mean(outputs[None]).argmax(-1) for outputs in held_out.clients]
    for name, own in zip(names[1:], says[1:], strict=True):
        if (order := other_order(own, says[0], likelihood.target.classes)) is not None:
            warn(
                f"{name} agrees with {names[0]} on {order.assumed:.0%} of the inputs, and on "
                f"{order.found:.0%} with its outputs as the classes "
                f"{order.named(likelihood.target.names)}. Files without cards must have their "
                "classes in one order"
            )


def counts_of(
    path: Path | None, models: Sequence[Path], silos: ClientModels, files: ModelFiles
) -> tuple[npt.NDArray[np.int64] | None, tuple[str, ...]]:
    """Samples of each client and class, and what to say of where they come from.

    Args:
        path: a file of counts; those in the models' files if there is none.
        models: their files.
        silos: what is in them.
        files: those whose weights were read before.

    Raises:
        DataError: the file of counts cannot be read, or does not fit the models.
        ModelError: they are of other classes than the models.
    """
    if path is None:
        sent = sent_counts(models, files)
        return sent, () if sent is None else (FROM_FILES,)
    counts, known = read_counts(path, models), silos.likelihood.target.classes
    if counts.shape[1] in (1, known):
        return counts, ()
    way = f"{known}"
    if not known:
        way = (
            "none. Leave --counts out, or give a number of samples for each model, as [[40], [60]]"
        )
    raise ModelError(
        f"{path} has counts of {counts.shape[1]} classes, but the models predict {way}"
    )


def divide_by(path: Path, temperature: float) -> str:
    """What other programs have to do with a file whose network has a temperature; or nothing."""
    if abs(temperature - 1) < 0.005:
        return ""
    return f"outside of fedbayes, divide the logits of {path} by {temperature:.4g}"


def write_network(
    path: Path,
    network: nn.Module,
    silos: ClientModels,
    method: Mapping[str, str],
    answering: nn.Module | None = None,
    temperature: float = 1.0,
) -> str:
    """Write a fused network: weights, or a program of raw samples (`.pt2`, `.onnx`).

    Args:
        path: the file.
        network: of samples as the silos' networks see them.
        silos: what it was fused from.
        method: how, for the file's card.
        answering: what a program computes in its place, by a temperature or a posterior.
        temperature: of the network, which the card of weights says.

    Returns:
        What a program takes, or what is to be done with outputs of weights, in words; or nothing.
    """
    likelihood = silos.likelihood
    card = silos.described(method)
    if path.suffix.lower() not in PROGRAMS:
        weights = silos.written(dict(network.state_dict()))
        card = card if temperature == 1 else replace(card, temperature=temperature)
        write_model(path, weights, card if silos.told else None)
        return divide_by(path, temperature) if silos.told else ""
    inputs = program_inputs(silos.preprocessing) if silos.told else UNTOLD
    card = replace(card, inputs=inputs, outputs=program_outputs(likelihood))
    write_beside(path, _program_of(path, answering or network, silos, card))
    return f"{path} takes {card.expects}"


def require_onnx(path: Path, silos: ClientModels) -> None:
    """See that networks such as these have an ONNX form if the file is of one, before long work."""
    if path.suffix.lower() == ".onnx":
        _program_of(path, silos.like, silos, silos.described({}))


def _program_of(path: Path, network: nn.Module, silos: ClientModels, card: Card) -> bytes:
    """The content of a program of raw samples."""
    seen = silos.preprocessing
    raw = seen.example(16, torch.Generator().manual_seed(0))
    return program_file(path, network, seen, silos.likelihood, card, raw)


def _cost(fusion: FunctionFusion, example: Tensor) -> tuple[str, ...]:
    """What to say of what predictions with a posterior of all layers cost."""
    found = fusion.calibration
    if found is None or isinstance(found.gaussian, LastLayer):
        return ()
    each, alone = (multiplications(network, example) for network in (found.module, fusion.module))
    return (
        f"a prediction with the posterior takes {each:,} multiplications, without it {alone:,}",
    )


def _say(watch: Callable[[str], None], before: str, text: str) -> None:
    watch(before + text)


def drawn(
    silos: ClientModels, name: str, sums: Sequence[Path] = (), seed: int = 0
) -> tuple[InputPrior, Inputs]:
    """A prior for the inputs of networks, and its draws as they see them.

    Raises:
        ConfigError: there is no such prior.
        DataError: samples or sums cannot be read, or do not fit.
    """
    seen = silos.preprocessing
    prior, inputs = drawn_for(seen, silos.settings, name, sums, seed)
    rows = len(seen.shape) == 1 and seen.tokens is None
    if rows and not (prior.standard or prior.bounded):
        odd = seen.other_units(prior.draw(512, np.random.default_rng(seed)))
        prior.notes += (f"inputs: {odd}",) if odd else ()
    if silos.programs and silos.card is None and prior.name == "gaussian" and prior.standard:
        raise ConfigError(
            "programs take rows in unknown units. Give the clients' sums with --sums, or real "
            "samples with --inputs"
        )
    return prior, inputs


def drawn_for(
    seen: Preprocessing,
    network: ModelSettings | None,
    name: str,
    sums: Sequence[Path] = (),
    seed: int = 0,
) -> tuple[InputPrior, Inputs]:
    """A prior for the inputs of a network that sees samples so, and its draws as it sees them.

    Raises:
        ConfigError: there is no such prior.
        DataError: samples or sums cannot be read, or do not fit.
    """
    prior: InputPrior
    if seen.tokens is not None:
        if sums and name != "auto":
            raise ConfigError(f"--sums has no effect on --inputs {name}. Give one of them")
        if sums:
            prior = prior_by_sums(seen.tokens, sums)
            return prior, Inputs.seen(prior, seen, seed)
        own = None if network is None else network.pretrained
        tokens = seen.tokens
        prior = text_inputs(
            name,
            own or tokens.tokenizer,
            tokens.length,
            tokenizer=tokens.tokenizer,
            column=tokens.column,
        )
        return prior, Inputs.seen(prior, seen, seed)
    known: Sums | Spectra | None = None
    if sums:
        table = len(seen.shape) == 1
        known = sums_of_clients(sums, seen.features) if table else spectra_of_clients(sums)
    prior = build_prior(
        name,
        seen.shape,
        sums=known,
        features=seen.features,
        columns=seen.columns,
    )
    return prior, Inputs.seen(prior, seen, seed)
