"""LoRA adapters of one frozen network made one, from files to a folder of PEFT or a file."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from fedbayes.core import pretrained
from fedbayes.core.devices import arithmetic, in_half
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion.adapted import (
    PORTION,
    adapted,
    changes_of,
    last_layer,
    portions,
    second_moments,
    widths,
    within,
)
from fedbayes.fusion.distillation import DistillationProgress, distill
from fedbayes.fusion.draws import CachedInputs, Draws
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.function import teacher_of
from fedbayes.fusion.low_rank import LayerChanges, LowRank, nearer, solved
from fedbayes.fusion.settings import AdapterInputSettings, DistillationSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.fusion.temperature import temperature
from fedbayes.inputs import InputPrior, Inputs, build_prior
from fedbayes.inputs.texts import text_inputs
from fedbayes.likelihoods import Classes, Likelihood, build_likelihood
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.temperature import has_temperature
from fedbayes.models import ModelSettings, build
from fedbayes.models.others import (
    LanguageNetwork,
    TextNetwork,
    build_other,
    language_model,
    token_mask,
)
from fedbayes.storage.formatting import number
from fedbayes.workflows.fuse.adapter_files import (
    FROZEN,
    Adapter,
    check_out,
    read_adapters,
    write_adapter,
)
from fedbayes.workflows.fuse.client_models import short_names
from fedbayes.workflows.fuse.function_settings import TRAINING, adapter_settings
from fedbayes.workflows.fuse.job import Fused, FusionJob
from fedbayes.workflows.fuse.methods import ADAPTERS
from fedbayes.workflows.fuse.network_fusing import divide_by, drawn_for
from fedbayes.workflows.fuse.posterior_files import FROM_FILES, sent_counts, sent_temperatures
from fedbayes.workflows.serve.model_files import read_counts

HELD_OUT = 256
"""Inputs that networks are compared on with the teacher."""
LONGEST = 3600.0
"""Seconds that least squares may take, by the time of the first inputs."""
MEMORY = 2 * 2**30
"""Bytes of second moments that are kept; with more, inputs go through the networks again."""
Watch = Callable[[str], None]


@dataclass(frozen=True)
class BaseNetwork:
    """The frozen network of adapters, and what goes into it."""

    module: nn.Module
    """From inputs, as it sees them, to outputs."""
    inputs: Draws
    prior: InputPrior
    likelihood: Likelihood | None
    """What its outputs mean; None: a class for each."""

    @property
    def texts(self) -> bool:
        """Whether its inputs are tokens."""
        return isinstance(self.module, TextNetwork)

    @property
    def speaks(self) -> bool:
        """Whether it is a language model, with an answer for every token."""
        return isinstance(self.module, LanguageNetwork)

    def mask(self, x: Tensor) -> Tensor | None:
        """Which tokens of inputs count."""
        return token_mask(x) if self.texts else None


def fuse_adapters(
    job: FusionJob,
    name: str,
    watch: Watch,
    progress: Callable[[DistillationProgress], object],
) -> Fused:
    """Fuse adapters; arguments and errors as for `FusionJob.run`."""
    return _AdapterFusion(job, name, watch, progress).run()


class _AdapterFusion:
    """A fusion of adapters under way."""

    def __init__(
        self,
        job: FusionJob,
        name: str,
        watch: Watch,
        progress: Callable[[DistillationProgress], object],
    ) -> None:
        self.job, self.name, self.watch, self.progress = job, name, watch, progress
        self.kind = ADAPTERS[name]
        self.settings: Any = (
            None
            if self.kind.settings is None
            else adapter_settings(self.kind.settings, job.settings, job.minutes)
        )
        watch("reading adapters")
        base = getattr(self.settings, "base", None)
        self.adapters = read_adapters(job.models, job.files, base)
        check_out(job.out, self.adapters, job.models)
        self.layers = sorted({layer for one in self.adapters for layer in one.layers})
        self.rank = self._rank()
        self.folders = any(one.card is None for one in self.adapters)
        table = None if self.folders else sent_counts(job.models, job.files)
        if job.counts is not None:
            table = read_counts(job.counts, job.models)
        self.notes = () if table is None or job.counts is not None else (FROM_FILES,)
        self.counts = table[:, 0] if table is not None and table.shape[1] == 1 else table
        first = self.adapters[0]
        if first.card is not None:
            self._check_counts(first.card.likelihood.target.classes)
        elif outputs := head_size(first.saved):
            self._check_counts(outputs)
        sizes = np.ones(len(self.adapters)) if table is None else table.sum(1).astype(float)
        self.teacher: Teacher | None = None
        self.alpha: list[float] = (sizes / sizes.sum()).tolist()

    def run(self) -> Fused:
        """Fuse and write."""
        begin = perf_counter()
        on_inputs = isinstance(self.settings, AdapterInputSettings)
        base = self._base() if on_inputs else None
        clients = [] if base is None else self._clients(base)
        saved = self._saved()
        if base is None:
            layers = {layer: self._merged(layer, ()) for layer in self.layers}
        else:
            try:
                layers, saved = self._on_inputs(base, clients, saved)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                raise ConfigError(
                    f"--ridge {self.settings.ridge:g}: the inputs of a layer do not determine its "
                    "change. Give a larger --ridge, such as 0.001"
                ) from None
        seconds = perf_counter() - begin
        scores: dict[str, float] = {}
        warmth = 1.0
        notes = (*self.notes, *self.job.some_sums, *(() if base is None else base.prior.notes))
        if base is not None:
            layers, saved, scores, warmth, kept = self._finish(base, clients, layers, saved)
            notes += kept
            if base.likelihood is not None and has_temperature(base.likelihood):
                notes = (*notes, self._teacher(base, clients).told)
        self.watch("writing")
        found = getattr(self.settings, "base", None)
        file = write_adapter(
            self.job.out, self.adapters, layers, saved, self.rank, self.name, found, warmth
        )
        divide = divide_by(self.job.out, warmth)
        size = sum(t.numel() for t in saved.values()) + sum(
            one.a.numel() + one.b.numel() for one in layers.values()
        )
        whole = perf_counter() - begin
        summary: dict[str, Any] = {"method": self.name, "rank": self.rank, "parameters": size}
        summary |= {"layers": len(layers), "bytes": file.stat().st_size, "seconds": whole}
        if scores:
            summary |= {"divergence": scores, "least_squares_seconds": seconds}
            summary |= {"temperature": warmth}
        return Fused(
            summary,
            f"{self.name}: {len(self.adapters)} adapters to one of rank {self.rank}, {size:,} "
            f"parameters in {len(layers)} layers, in {whole:.1f} s\n{self.job.written()}"
            + (f"\n{divide}" if divide else ""),
            notes,
            (_table(scores),) if scores else (),
        )

    def _rank(self) -> int:
        """The rank of the fused adapter."""
        ranks = [one.rank for one in self.adapters]
        if self.name == "cat":
            return max(
                sum(one.layers[layer].rank for one in self.adapters if layer in one.layers)
                for layer in self.layers
            )
        wanted = getattr(self.settings, "rank", None)
        if wanted is None:
            return max(ranks)
        changes = [one.layers[n] for one in self.adapters for n in one.layers]
        widest = max(min(len(one.b), one.a.shape[1]) for one in changes)
        most = min(sum(ranks), widest)
        if self.name in ("ties", "dare"):  # entry by entry, so that ranks do not add
            most = widest
        if wanted > most:
            raise ConfigError(
                f"--rank {wanted}: the adapters have the ranks {', '.join(map(str, ranks))} in "
                f"layers of up to {widest}, so more than {most} has no effect. Give {most} or "
                "less"
            )
        return int(wanted)

    def _merged(self, layer: str, moments: Sequence[Tensor]) -> LowRank:
        """The fused change of a layer."""
        own = [one.layers.get(layer) for one in self.adapters]
        changes = LayerChanges(layer, own, self.alpha, self.rank, moments)
        merge = resolve_name(f"fedbayes.fusion.{self.kind.merge}")
        found: LowRank = merge(changes, self.settings)
        return found

    def _saved(self) -> Tensors:
        """The mean of what was trained besides the layers."""
        found: Tensors = {}
        for name, like in self.adapters[0].saved.items():
            each = zip(self.alpha, self.adapters, strict=True)
            found[name] = sum(
                (share * one.saved[name].double() for share, one in each),
                torch.zeros(like.shape, dtype=torch.float64),
            )
        return found

    def _base(self) -> BaseNetwork:
        """The frozen network, and inputs of it."""
        self.watch("loading the base network")
        found = open_base(self.adapters, self.job, self.settings)
        found = replace(found, inputs=CachedInputs(found.inputs))
        if found.speaks and (self.job.minutes or "distillation" in self.job.settings):
            what = "--minutes has" if self.job.minutes else f"{TRAINING}* settings have"
            raise ConfigError(
                f"{what} no effect on a language model: it is not trained end to end, since its "
                "outputs for all tokens need too much memory"
            )
        self._check_counts(0 if found.likelihood is None else found.likelihood.target.classes)
        return found

    def _check_counts(self, known: int) -> None:
        """Check that counts have this number of classes."""
        if self.counts is not None and self.counts.ndim == 2 and self.counts.shape[1] != known:
            raise ModelError(
                f"{self.job.counts} has counts of {self.counts.shape[1]} classes, but the adapters "
                f"predict {known or 'none. Give a number of samples for each, as [[40], [60]]'}"
            )

    def _clients(self, base: BaseNetwork) -> list[nn.Module]:
        """The clients' networks, which share its weights."""
        own = dict(within(base.module).named_parameters(remove_duplicate=False))
        for one in self.adapters:
            for name, tensor in one.frozen.items():
                there = own.get(name.replace(FROZEN, "."))
                if there is None or not torch.equal(there.to(tensor), tensor):
                    raise ModelError(
                        f"{one.source} has other frozen weights {name!r} than the base network. "
                        "Use --method svd, which needs none"
                    )
        return [adapted(base.module, one.layers, one.saved, one.source) for one in self.adapters]

    def _on_inputs(
        self, base: BaseNetwork, clients: Sequence[nn.Module], saved: Tensors
    ) -> tuple[dict[str, LowRank], Tensors]:
        """Changes and heads by least squares on inputs."""
        inside = within(base.module)
        heads = self._heads(inside)
        wanted = [*self.layers, *heads]
        for layer in self.layers:
            if widths(inside.get_submodule(layer)) == (0, 0):
                raise ModelError(
                    f"the layer {layer} is not dense. Use --method svd, which needs no inputs"
                )
        number = math.ceil(self.settings.draws / PORTION)
        drawing, batches = _Pace("drawing inputs", self.watch, number), []
        for place in range(number):
            batches.append(base.inputs.batch(place, PORTION))
            drawing.step(place)
        groups = _groups(wanted, [widths(inside.get_submodule(n))[1] for n in wanted], len(clients))
        pace = _Pace("least squares", self.watch, len(groups) * len(clients) * number)
        layers, saved = {}, dict(saved)
        ridge, said = self.settings.ridge, [list[Tensor]() for _ in clients]
        half = self._half(base) and ridge > 0  # rounding would hide what inputs do not determine
        for group in groups:
            known = base.speaks or bool(said[0])
            with arithmetic(half, torch.device("cpu")):
                moments = [
                    second_moments(
                        client,
                        group,
                        batches,
                        base.mask,
                        frozenset(heads),
                        pace.step,
                        None if known else own,
                    )
                    for client, own in zip(clients, said, strict=True)
                ]
            for layer in group:
                own = [one.pop(layer) for one in moments]
                if layer in heads:
                    saved |= self._head(inside.get_submodule(layer), layer, own, ridge)
                else:
                    layers[layer] = self._merged(layer, own)
        if heads and said[0]:
            with arithmetic(half, torch.device("cpu")):
                saved |= self._taught(base, clients, layers, saved, heads, batches, said)
        return layers, saved

    def _taught(
        self,
        base: BaseNetwork,
        clients: Sequence[nn.Module],
        layers: Mapping[str, LowRank],
        saved: Tensors,
        heads: Sequence[str],
        batches: Sequence[Tensor],
        said: Sequence[Sequence[Tensor]],
    ) -> Tensors:
        """The last layer moved by least squares to what the clients say together."""
        network = adapted(base.module, layers, saved, "the fused adapter")
        found = last_layer(network, heads, batches)
        if found is None:
            return {}
        name, inputs, outputs = found
        teacher = self._teacher(base, clients)
        missing = teacher.of([torch.cat(list(own)) for own in said]) - outputs.float()
        if isinstance(teacher.likelihood(outputs.shape[-1]), Categorical):
            missing = missing - missing.mean(1, keepdim=True)
        more = nearer(inputs, missing, self.settings.ridge)
        weight, bias = f"{name}.weight", f"{name}.bias"
        moved = {weight: saved[weight] + more[:, :-1].reshape(saved[weight].shape)}
        return moved | ({bias: saved[bias] + more[:, -1]} if bias in saved else {})

    def _teacher(self, base: BaseNetwork, clients: Sequence[nn.Module]) -> Teacher:
        """The clients together."""
        if self.teacher is not None:
            return self.teacher
        cards = {one.source: one.card for one in self.adapters}
        short = short_names(
            {path: card.client if card else Path(path).name for path, card in cards.items()}
        )
        named = dict(zip(short.values(), clients, strict=True))
        warmth: list[float | None] | None = None
        if not self.folders and base.likelihood is not None and has_temperature(base.likelihood):
            warmth = sent_temperatures(self.job.models, self.job.files)
        self.teacher = teacher_of(named, self.counts, base.likelihood, warmth, base.inputs)[0]
        return self.teacher

    def _heads(self, inside: nn.Module) -> list[str]:
        """Dense layers that clients trained whole."""
        found = []
        for name in self.adapters[0].saved:
            layer, _, part = name.rpartition(".")
            if part == "weight" and isinstance(inside.get_submodule(layer), nn.Linear):
                found.append(layer)
        return found

    def _head(
        self, layer: nn.Module, name: str, moments: Sequence[Tensor], ridge: float
    ) -> Tensors:
        """A dense layer that answers as those of the clients, each on its own inputs."""
        names = [f"{name}.weight"] + ([f"{name}.bias"] if layer.bias is not None else [])
        joined = []
        for one in self.adapters:
            parts = [one.saved[part].double() for part in names if part in one.saved]
            if len(parts) == 1:  # without a bias of its own, nothing of it is constant
                parts.append(torch.zeros(len(parts[0]), dtype=torch.float64))
            joined.append(torch.cat([parts[0], parts[1][:, None]], 1))
        has_bias = names[-1] in self.adapters[0].saved and len(names) > 1
        if not has_bias:
            joined = [one[:, :-1] for one in joined]
            moments = [one[:-1, :-1] for one in moments]
        found = solved(joined, moments, self.alpha, ridge)
        return (
            dict(zip(names, (found[:, :-1], found[:, -1]), strict=True))
            if has_bias
            else {names[0]: found}
        )

    def _training(self, base: BaseNetwork) -> DistillationSettings | None:
        """How to train end to end, if that is to be."""
        found: DistillationSettings | None = getattr(self.settings, "distillation", None)
        return None if base.speaks else found

    def _half(self, base: BaseNetwork) -> bool:
        """Whether clients are asked in bfloat16: where the fused network also trains in it."""
        training = self._training(base)
        return training is not None and in_half(training.precision, torch.device("cpu"))

    def _finish(
        self,
        base: BaseNetwork,
        clients: Sequence[nn.Module],
        layers: dict[str, LowRank],
        saved: Tensors,
    ) -> tuple[dict[str, LowRank], Tensors, dict[str, float], float, tuple[str, ...]]:
        """End to end, if it brings the network nearer to the teacher; scores, the temperature of
        the network, and notes.
        """
        fused = adapted(base.module, layers, saved, "the fused adapter")
        teacher = self._teacher(base, clients)
        held_out = portions(base.inputs.batch(-1, HELD_OUT))
        networks = {_SOLVED: fused}
        training = self._training(base)
        if training is not None:
            self.watch("training end to end")
            # Of other inputs than those of least squares, which it follows already.
            found = distill(fused, teacher, base.inputs, training, watch=self.progress)
            if found.step:
                networks["fused"] = found.module
        self.watch("comparing with the ensemble")
        scores, warmth = judged(networks, teacher, held_out, self._half(base))
        better = "fused" in scores and scores["fused"] <= scores[_SOLVED]
        if better:
            layers = changes_of(networks["fused"])
            own = dict(within(networks["fused"]).named_parameters())
            saved = {name: own[name].detach() for name in saved}
        else:
            scores.pop("fused", None)
        in_vain = training is not None and not better
        notes = (_NOT_NEARER,) if in_vain else ()
        return layers, saved, scores, warmth["fused" if better else _SOLVED], notes


_SOLVED = "fused, least squares"
_NOT_NEARER = (
    "training end to end came no nearer to the teacher, so the adapter is that of least squares"
)


class _Pace:
    """Tells of the time that is left, and ends what would take too long."""

    def __init__(self, what: str, watch: Watch, steps: int) -> None:
        self.what, self.watch, self.steps = what, watch, steps
        self.done, self.begin = 0, perf_counter()

    def step(self, done: int) -> None:
        """After a batch.

        Raises:
            ConfigError: the others would take hours.
        """
        self.done += 1
        each = (perf_counter() - self.begin) / self.done
        left = each * (self.steps - self.done)
        if left > LONGEST:
            raise ConfigError(
                f"{self.what} would take {left / 3600:.1f} hours. Use fewer (--draws 128), "
                "shorter texts (--length 16), or --method svd"
            )
        self.watch(f"{self.what}: {self.done / self.steps:.0%}, {left:.0f} s left")


def _groups(layers: Sequence[str], inputs: Sequence[int], clients: int) -> list[list[str]]:
    """Layers whose second moments fit into `MEMORY` together, in order."""
    groups: list[list[str]] = [[]]
    kept = 0
    for layer, width in zip(layers, inputs, strict=True):
        size = 8 * clients * (width + 1) ** 2
        if groups[-1] and kept + size > MEMORY:
            groups.append([])
            kept = 0
        groups[-1].append(layer)
        kept += size
    return groups


@torch.no_grad()
def judged(
    networks: Mapping[str, nn.Module],
    teacher: Teacher,
    held_out: Sequence[Tensor],
    half: bool = False,
) -> tuple[dict[str, float], dict[str, float]]:
    """KL(teacher ‖ network) in nats of each client and network, the mean over held-out answers; and
    the temperature of each network, which is that of the pooled teacher.

    Args:
        networks: by name, besides the clients.
        teacher: the clients together.
        held_out: inputs, in batches.
        half: whether to ask clients in bfloat16.

    Returns:
        Both by name. Temperatures are 1 where no client has one.
    """
    functions = {name: frozen(one, name) for name, one in networks.items()}
    totals, count = dict.fromkeys([*teacher.names, *networks], 0.0), 0
    pooled = teacher.pooled() if any(teacher.temperatures) else None
    wanted: list[Tensor] = []
    outputs: dict[str, list[Tensor]] = {name: [] for name in networks}
    for x in held_out:
        with arithmetic(half, x.device):
            clients = [client(x).float() for client in teacher.clients]
        taught = teacher.of(clients)
        kind = teacher.likelihood(taught.shape[-1])
        count += len(taught)
        own = {name: function(x) for name, function in functions.items()}
        for name, found in (dict(zip(teacher.names, clients, strict=True)) | own).items():
            totals[name] += float(kind.divergence(taught, found).double().sum())
        if pooled is not None and isinstance(kind, Classes):
            wanted.append(pooled.of(clients))
            for name, found in own.items():
                outputs[name].append(found)
    # Rounding can make it negative.
    scores = {name: max(total / count, 0.0) for name, total in totals.items()}
    if not wanted:
        return scores, dict.fromkeys(networks, 1.0)
    assert isinstance(kind, Classes)
    goal = torch.cat(wanted)
    return scores, {n: temperature(torch.cat(own), goal, kind) for n, own in outputs.items()}


def _table(scores: Mapping[str, float]) -> Table:
    table = Table("network", "KL divergence to\nthe teacher (nats)", pad_edge=False)
    for name, far in scores.items():
        table.add_row(name, number(far))
    return table


def open_base(
    adapters: Sequence[Adapter], job: FusionJob, settings: AdapterInputSettings
) -> BaseNetwork:
    """The frozen network of adapters.

    Raises:
        ModelError: it is not here, or is for something else than texts or images.
        ConfigError: there is no such input prior.
        DataError: samples cannot be read.
    """
    first = adapters[0]
    if first.card is not None and first.settings is not None:
        for option in ("base", "length"):
            if option in settings.model_fields_set:
                raise ConfigError(
                    f"--{option} has no effect on clients' files, which have their own. Leave it "
                    "out"
                )
        card = first.card
        plain = first.settings.model_copy(update={"trains": "head"})
        shape, outputs = card.preprocessing.shape, card.likelihood.outputs
        module = build(plain, shape, outputs, seed=0).module
        prior, inputs = drawn_for(
            card.preprocessing, first.settings, job.inputs or "auto", job.sums, job.seed
        )
        return BaseNetwork(module, inputs, prior, card.likelihood)
    if job.sums:
        raise ConfigError(
            "--sums has no effect on PEFT folders. Give texts with --inputs FILE, or leave it out"
        )
    name = settings.base or first.base
    if not name:
        raise ModelError(
            f"{first.source} does not give its base network. Give it with --base, or use --method "
            "svd"
        )
    task = first.config.get("task_type")
    if task not in (None, "SEQ_CLS", "CAUSAL_LM"):
        raise ModelError(
            f"{first.source} is for {task} (task_type), but inputs are only for SEQ_CLS and "
            "CAUSAL_LM. Use --method svd, which needs none"
        )
    if task == "CAUSAL_LM":
        found = language_model(name, ModelError, "causal")
        if found is None:
            raise ModelError(f"{name} is not a causal language model, unlike {first.source}")
        prior = text_inputs(job.inputs, name, _length(found[0].network.config, settings))
        return BaseNetwork(found[0], _plain(prior, job.seed), prior, None)
    return _classifier(first, name, job, settings)


def head_size(saved: Tensors) -> int:
    """The outputs of the head among tensors that were trained; 0 if there is none."""
    sizes = {name: len(tensor) for name, tensor in saved.items() if tensor.ndim == 2}
    named = [size for name, size in sizes.items() if name.startswith(("classifier.", "score."))]
    others = [size for name, size in sizes.items() if "pooler" not in name]
    return min(named or others, default=0)


def _length(config: Any, settings: AdapterInputSettings) -> int:
    """Tokens of a text: by default as many as the network takes, up to the setting.

    Raises:
        ConfigError: the user wants more than the network takes.
    """
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or settings.length
    if settings.length > most and "length" in settings.model_fields_set:
        raise ConfigError(
            f"--length {settings.length}: the base network takes at most {most} tokens. Give "
            f"{most} or less"
        )
    return min(settings.length, int(most))


def _plain(prior: InputPrior, seed: int) -> Inputs:
    """Inputs that networks see as they are drawn."""
    return Inputs(prior, torch.zeros(()), torch.ones(()), seed)


def _classifier(
    first: Adapter, name: str, job: FusionJob, settings: AdapterInputSettings
) -> BaseNetwork:
    """A base network of texts or images with a head, whose size the adapter says."""
    pretrained.require("transformers", "a base network", ModelError)
    import transformers

    def configure(place: str, **options: Any) -> Any:
        return transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **options)

    config = pretrained.load("the base network", name, configure, ModelError)
    outputs = head_size(first.saved) or config.num_labels
    own = ModelSettings(name="transformers", pretrained=name, trains="head")
    module: Any
    channels, side = getattr(config, "num_channels", None), getattr(config, "image_size", None)
    if side is not None and channels is not None:
        sides = (side, side) if isinstance(side, int) else tuple(side)
        module = build_other(own, (channels, *sides), outputs)
        processor = pretrained.image_processor(name, ModelError)
        prior = build_prior(job.inputs or "auto", (channels, *sides))
        mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
        inputs = Inputs(prior, mean, std, job.seed)
    else:
        length = _length(config, settings)
        module = build_other(own, (length,), outputs)
        prior = text_inputs(job.inputs, name, length)
        inputs = _plain(prior, job.seed)
    if lost := sorted(module.absent - first.saved.keys()):
        raise ModelError(
            f"{lost[0]} is neither in the files of {name} nor in {first.source}, so its values "
            "would be random. Train it with modules_to_save, or use --method svd"
        )
    if outputs == 1:
        raise ModelError(
            f"{first.source} predicts one number, and its unit is unknown. Use --method svd"
        )
    target = Target("class", tuple(map(str, range(outputs))))
    return BaseNetwork(module, inputs, prior, build_likelihood("auto", target))
