"""In which precision a run computes where `precision = "auto"` leaves it to be found."""

import json
import os
import platform
import statistics
import time
from hashlib import sha256

import torch

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation
from fedbayes.core.files import write_beside
from fedbayes.core.tensors import Samples
from fedbayes.data import FederatedData
from fedbayes.data.cache import cache_folder
from fedbayes.errors import ConfigError, ModelError
from fedbayes.federation.engine_table import ENGINES
from fedbayes.models.settings import Precision

CLEARLY = 0.8
"""Share of float32's time that a step may take at most for bf16 to be chosen."""
SMALL = 50_000
"""Parameters of a network below which bf16 is not tried."""
_SECONDS = 0.8
"""How long steps are timed."""


def choose(
    config: Config, method: AnyMethod, run: Federation, data: FederatedData
) -> tuple[Precision, str]:
    """The precision of a run whose config leaves it to be found.

    It is float32 unless the user asked for speed (`deterministic = false`, and not
    `bits = "portable"`): a choice by the clock
    may differ from one machine to the next, and with it all numbers. Then bf16 is tried where the
    machine has units for it (a GPU, or a CPU with AMX), the network is not small and the method can
    compute in it. It is chosen where a training step takes at most `CLEARLY` of float32's time.
    That is measured once, and kept in the user's cache folder.

    Args:
        config: the settings.
        method: of the run.
        run: with the network, which computes in float32.
        data: the clients' data.

    Returns:
        The precision, and what there is to say of it; empty if nothing is.
    """
    parameters = sum(t.numel() for t in run.network.initial.values())
    elsewhere = ENGINES[config.engine].states == "remote"
    portable = config.bits == "portable"
    if config.deterministic or portable or elsewhere or parameters < SMALL:
        return "float32", ""
    if not (has_units(run.network.device) and _takes_bf16(method, run)):
        return "float32", ""
    share = _known_share(config, run, data)
    if share > CLEARLY:
        return "float32", ""
    return "bf16", (
        f"precision = 'auto' chose bf16: a training step of this network takes {share:.2f} of "
        "float32's time on this machine. On another machine it may be float32. Set precision for "
        "the same choice everywhere"
    )


def has_units(device: torch.device) -> bool:
    """Whether a device has units for bf16; without them it is no faster than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return device.type == "cpu" and bool(amx())


def _takes_bf16(method: AnyMethod, run: Federation) -> bool:
    """Whether a method can work with a network that computes in bf16."""
    run.network.precision = "bf16"
    try:
        method.check(run)
    except (ConfigError, ModelError):
        return False
    finally:
        run.network.precision = "float32"
    return True


def _known_share(config: Config, run: Federation, data: FederatedData) -> float:
    """The share of float32's time that a step takes in bf16, as it was first measured."""
    network, file = run.network, cache_folder() / "precision.json"
    device = network.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.node()
    shapes = [(name, tuple(t.shape)) for name, t in network.initial.items()]
    place = (machine, platform.machine(), os.cpu_count(), config.threads, torch.__version__)
    what = (str(network.module), shapes, network.shape, config.training.batch_size)
    key = sha256(repr((place, what)).encode()).hexdigest()[:16]
    try:
        known = json.loads(file.read_text())
        return float(known[key])
    except (OSError, ValueError, KeyError, TypeError):
        share = _measured(config, run, data)
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        kept = {}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = kept if isinstance(kept, dict) else {}
        write_beside(file, json.dumps(kept | {key: share}).encode())
    except OSError:
        pass  # then it is measured again
    return share


def _measured(config: Config, run: Federation, data: FederatedData) -> float:
    """Times steps of both kinds in turn; 1 where there is nothing to step on, or a step fails."""
    found = next((s for c in range(data.clients) if len((s := data.train(c)).y)), None)
    if found is None:
        return 1.0
    rows = torch.arange(config.training.batch_size) % len(found.y)
    batch = Samples(found.x[rows].to(run.network.device), found.y[rows].to(run.network.device))
    taken: dict[Precision, list[float]] = {"float32": [], "bf16": []}
    threads, end = torch.get_num_threads(), time.perf_counter() + _SECONDS
    torch.set_num_threads(config.threads)
    try:
        with torch.random.fork_rng():
            while time.perf_counter() < end or len(taken["bf16"]) < 2:
                for precision, seconds in taken.items():
                    run.network.precision = precision
                    seconds.append(_step(run, batch))
    except (RuntimeError, ModelError):  # what is wrong is said where it is trained
        return 1.0
    finally:
        run.network.precision = "float32"
        torch.set_num_threads(threads)
    half, whole = (statistics.median(taken[kind][1:]) for kind in ("bf16", "float32"))
    return half / whole


def _step(run: Federation, batch: Samples) -> float:
    """Seconds of a gradient."""
    trained = run.network.split()[0]
    weights = run.network.prepare(run.network.initial)
    leaves = [weights[name].requires_grad_() for name in trained]
    _wait(run.network.device)
    began = time.perf_counter()
    loss = run.likelihood.nll(run.network(weights, batch.x, training=True), batch.y)
    torch.autograd.grad(loss, leaves, allow_unused=True)
    _wait(run.network.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
