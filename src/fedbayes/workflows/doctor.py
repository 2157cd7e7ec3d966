"""The machine as runs see it: its parts, what runs use, what would be faster or is missing."""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import psutil
import torch
from joblib import cpu_count
from packaging.requirements import Requirement
from torch import nn

from fedbayes.config.config import Config
from fedbayes.core import pretrained
from fedbayes.core.brief import Brief
from fedbayes.core.lazy import named, offers
from fedbayes.data.cache import cache_folder
from fedbayes.data.source_settings import BUILT_IN
from fedbayes.errors import ConfigError
from fedbayes.federation.attacks import ATTACKS
from fedbayes.federation.engine_table import ENGINES
from fedbayes.likelihoods import LIKELIHOODS
from fedbayes.methods import METHODS
from fedbayes.models import MLP, LeNet5
from fedbayes.models.settings import NAMES
from fedbayes.runs.precision import has_units

EXTRAS = {
    "flower": "federations over a network",
    "hf": "pretrained networks and adapters",
    "mlflow": "tracking with MLflow",
    "onnx": "export to ONNX",
    "papers": "experiments of the papers",
    "privacy": "ε of noise, and encrypted states",
    "ray": "runs on many machines",
    "sql": "tables from databases",
    "tensorboard": "tracking with TensorBoard",
}
"""Optional parts of the package, and what each is for."""
USED = {
    "flower": ("flwr.app:Context", "flwr.serverapp:ServerApp"),
    "mlflow": ("mlflow.entities:Metric",),
    "onnx": ("onnx.reference:ReferenceEvaluator", "onnxscript:script"),
    "papers": ("fedbayes_papers:__doc__",),
    "privacy": (
        "dp_accounting.pld:PLDAccountant",
        "cryptography.hazmat.primitives.ciphers:Cipher",
    ),
    "ray": ("ray:init",),
    "sql": ("sqlalchemy:create_engine",),
    "tensorboard": ("torch.utils.tensorboard:SummaryWriter",),
}
"""What runs import of each; those of `hf` are in `pretrained.require`."""
OFFERED: dict[str, tuple[str, Collection[str]]] = {
    "methods": ("method", METHODS),
    "likelihoods": ("likelihood", LIKELIHOODS),
    "models": ("model", NAMES),
    "attacks": ("attack", ATTACKS),
    "data": ("data set", BUILT_IN),
    "stages": ("stage", ()),
    "engines": ("engine", tuple(ENGINES)),
}
"""Groups of entry points: what other packages offer in them, and names that are built in."""
LEAST_MEMORY, LEAST_DISK = 2 << 30, 1 << 30
"""Free bytes below which a run may fail."""
FASTER = 0.9
"""Share of the time that counts as faster."""
_TURNS = 9


@dataclass(frozen=True)
class Extra(Brief):
    """An optional part of the package."""

    name: str
    purpose: str
    missing: tuple[str, ...]
    """Packages that are absent or too old; none: the extra is installed."""
    trouble: str = ""
    """Why what is installed cannot be imported; empty if it can."""


@dataclass(frozen=True)
class Plugin(Brief):
    """A thing that another installed package offers by an entry point."""

    kind: str
    name: str
    package: str
    place: str
    """As `package.module:name`."""
    trouble: str
    """Why a run cannot use it; empty if it can."""


@dataclass(frozen=True)
class Diagnosis(Brief):
    """What `fedbayes doctor` prints.

    Examples:
        >>> from fedbayes.workflows.doctor import examine
        >>> examine().machine["cores"] >= 1
        True
    """

    machine: dict[str, str | int | float]
    """Processor, cores, memory and disk (bytes free), versions and GPUs."""
    chosen: dict[str, str | int]
    """Settings of a run without options on this machine."""
    faster: tuple[str, ...]
    """What would be faster, a sentence each."""
    warnings: tuple[str, ...]
    """What may let a run fail, a sentence each."""
    extras: tuple[Extra, ...]
    plugins: tuple[Plugin, ...]


def examine(folder: Path | str = ".") -> Diagnosis:
    """Look at this machine, in a few seconds, and import what the installed extras need.

    Args:
        folder: where runs are to be written.
    """
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    memory, cores = psutil.virtual_memory(), int(cpu_count())
    cache = cache_folder()
    place = next(path for path in (cache, *cache.parents) if path.is_dir())
    machine: dict[str, str | int | float] = {
        "processor": _processor(),
        "cores": cores,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16 units": "yes" if has_units(torch.device("cpu")) else "no",
        "GPUs": ", ".join(gpus) or "none",
        "memory free": memory.available,
        "disk free for runs": psutil.disk_usage(str(folder)).free,
        "disk free for data": psutil.disk_usage(str(place)).free,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
    }
    config = Config.create()
    chosen: dict[str, str | int] = {
        "engine": config.engine,
        "threads": config.threads,
        "devices": ", ".join(config.devices),
        "precision": config.precision,
    }
    faster = _faster(cores, bool(gpus))
    return Diagnosis(machine, chosen, faster, _risks(machine), _extras(), _plugins())


def _processor() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _faster(cores: int, gpu: bool) -> tuple[str, ...]:
    """What would be faster than a run without options."""
    found = [
        "--engine stacked: trains up to 64 clients at once if the network has less than 700 kB; "
        "results differ by rounding"
    ]
    if cores > 1:
        for name, share in _shares(cores).items():
            if share < FASTER:
                found.append(
                    f"--set threads={cores}: a training step of {name} takes {share:.2f} of one "
                    "thread's time; results may depend on it"
                )
    if gpu:
        found.append("--device cuda: for convolutional networks; small ones are faster on the CPU")
    if has_units(torch.device("cuda" if gpu else "cpu")):
        found.append(
            "--set deterministic=false: computes in bf16 if a step takes at most 0.8 of the time"
        )
    return tuple(found)


def _shares(cores: int) -> dict[str, float]:
    """The time of a training step with all cores relative to one thread, by network."""
    before, found = torch.get_num_threads(), {}
    steps = {
        "an MLP (784-200-10, batch 32)": _step(MLP(784, [200], 10), torch.randn(32, 784)),
        "LeNet-5 (CIFAR-10, batch 64)": _step(LeNet5(3, 32, 32, 10), torch.randn(64, 3, 32, 32)),
    }
    try:
        for name, step in steps.items():
            seconds: dict[int, list[float]] = {1: [], cores: []}
            for _ in range(_TURNS):
                for threads, times in seconds.items():
                    torch.set_num_threads(threads)
                    begin = time.perf_counter()
                    step()
                    times.append(time.perf_counter() - begin)
            found[name] = statistics.median(seconds[cores]) / statistics.median(seconds[1])
    finally:
        torch.set_num_threads(before)
    return found


def _step(network: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """A forward and a backward pass."""
    y = torch.zeros(len(x), dtype=torch.int64)
    weights = list(network.parameters())
    return lambda: torch.autograd.grad(nn.functional.cross_entropy(network(x), y), weights)


def _risks(machine: dict[str, str | int | float]) -> tuple[str, ...]:
    """What may let a run fail."""
    found = []
    if int(machine["memory free"]) < LEAST_MEMORY:
        found.append("less than 2 GiB of memory are free. End other programs")
    found += [
        f"{what}: less than 1 GiB. Free some space, or use another folder"
        for what in ("disk free for runs", "disk free for data")
        if int(machine[what]) < LEAST_DISK
    ]
    if (limit := os.environ.get("OMP_NUM_THREADS")) and limit != "1":
        found.append(
            f"OMP_NUM_THREADS is {limit}, but runs set their own number of threads (threads)"
        )
    return tuple(found)


def _extras() -> tuple[Extra, ...]:
    """The optional parts, and what each lacks."""
    needs: dict[str, list[str]] = {name: [] for name in EXTRAS}
    try:
        lines = requires("fedbayes") or []
    except PackageNotFoundError:  # run from its sources
        lines = []
    for requirement in map(Requirement, lines):
        for name, missing in needs.items():
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": ""}):
                continue
            if marker.evaluate({"extra": name}) and not _has(requirement):
                missing.append(requirement.name)
    return tuple(
        Extra(name, EXTRAS[name], tuple(lacks), "" if lacks else _trouble(name))
        for name, lacks in needs.items()
    )


def _trouble(extra: str) -> str:
    """Why the packages of an extra that is installed cannot be imported; empty if they can."""
    try:
        if extra == "hf":
            for package in ("transformers", "peft", "timm"):
                pretrained.require(package, package, ConfigError)
        for place in USED.get(extra, ()):
            named(place, "import")
    except ConfigError as error:
        return str(error)
    return ""


def _plugins() -> tuple[Plugin, ...]:
    """All that other packages offer, each imported once."""
    found = []
    for group, (kind, known) in OFFERED.items():
        for offer in offers(group):
            trouble = "hidden: the name is built in" if offer.name in known else ""
            try:
                named(offer.place, kind)
            except ConfigError as error:
                trouble = str(error)
            found.append(Plugin(kind, offer.name, offer.package, offer.place, trouble))
    return tuple(found)


def _has(requirement: Requirement) -> bool:
    """Whether a package is installed in a version that will do."""
    try:
        return requirement.specifier.contains(distribution(requirement.name).version, True)
    except PackageNotFoundError:
        return False
