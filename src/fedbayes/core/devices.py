"""Devices that networks compute on: by name, copies to them, and the same numbers on every run.

A config names them (`devices`), and a process computes on one of them. An engine with many
processes gives each its own (`runs.build.runtime`). A `ClientRuntime` keeps samples on its device
within `data_cache` (`DeviceCache`). Where the device has no memory left, it lets them go and trains
the client once more.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from fedbayes.errors import ConfigError, did_you_mean

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What a process has in its environment before it starts CUDA, for cuBLAS to be deterministic."""
NAMES = ("cpu", "cuda", "auto", "mps", "xpu")


def find_devices(names: Sequence[str]) -> tuple[torch.device, ...]:
    """The devices of these names, of which none is started; `auto` is every GPU, or the CPU.

    Raises:
        ConfigError: there is no such device, or they are of several kinds, on which a client's
            numbers would depend on who was idle.
    """
    found = [device for name in names for device in _find(name)]
    kinds = sorted({device.type for device in found})
    if len(kinds) > 1:
        raise ConfigError(
            f"devices are of several kinds ({', '.join(kinds)}), which round differently, so "
            "results would depend on which was idle. Give devices of one kind"
        )
    return tuple(found)


def choose_device(name: str) -> torch.device:
    """The device of this name, started; of `auto`, the first GPU, or the CPU.

    Raises:
        ConfigError: there is no such device, or it cannot be used.
    """
    device = _find(name)[0]
    if device.type == "cpu":
        _keep_freed_memory()
    try:
        torch.zeros(1, device=device).item()  # of `meta`, there are no values
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"device {name!r} has no memory left, because other processes use it. End them, or "
            "choose another device"
        ) from None
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {_first_line(error)}") from None
    return device


def in_half(precision: str, device: torch.device, large: bool = True) -> bool:
    """Whether to compute in bfloat16: as chosen, or by default (auto) if a network is large and the
    processor is fast at it.
    """
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return large and bool(torch.cuda.is_bf16_supported())
    return large and bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def arithmetic(half: bool, device: torch.device) -> AbstractContextManager[None]:
    """Arithmetic in bfloat16, or as it is."""
    if not half:
        return nullcontext()
    found: AbstractContextManager[None] = torch.autocast(device.type, torch.bfloat16)
    return found


@cache
def _keep_freed_memory() -> None:
    """Have glibc keep up to 256 MiB of freed memory for the next step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 1 << 28)
        mallopt(_MMAP_THRESHOLD, 1 << 25)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of `mallopt(3)`: freed bytes at the end of the heap, and bytes from which a block is mapped."""


def _find(name: str) -> list[torch.device]:
    """The device of a name, or those that `auto` stands for."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        return [torch.device("cuda", number) for number in range(gpus)] or [torch.device("cpu")]
    try:
        device = torch.device(name)
    except RuntimeError:
        kind = name.partition(":")[0]
        near = "cuda" if kind == "gpu" else kind
        like = "" if kind in NAMES else did_you_mean(near, NAMES)
        raise ConfigError(
            f"unknown device {name!r}{like}. Choose cpu, auto, cuda, or with a number cuda:0, "
            "cuda:1 and so on"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= gpus:
        there = {0: "PyTorch finds no GPU", 1: "PyTorch finds one GPU, cuda:0"}.get(
            gpus, f"PyTorch finds {gpus} GPUs, cuda:0 to cuda:{gpus - 1}"
        )
        raise ConfigError(f"device {name!r} cannot be used: {there}. Use 'cpu' or 'auto'")
    # A GPU without a number is the first: CUDA sets no current device without one.
    return [torch.device("cuda", device.index or 0) if device.type == "cuda" else device]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, and no wait for the copy: from memory that is pinned, where that is a
    GPU. What computes there comes after the copy all the same.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def repeatable(device: torch.device, wanted: bool) -> Callable[[], None]:
    """Have this process compute the same bits on every run, where a device would not by itself.

    On the CPU it always does. On a GPU, operations that have no deterministic algorithm then raise
    an error (`nondeterministic`).

    Args:
        device: which it computes on; a GPU becomes the process's current one.
        wanted: false leaves PyTorch as it is.

    Returns:
        What puts PyTorch back as it was.
    """
    if device.type != "cuda":
        return lambda: None
    torch.cuda.set_device(device)
    if not wanted:
        return lambda: None
    for name, value in CUBLAS.items():
        os.environ.setdefault(name, value)
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(before, warn_only=warned)


def nondeterministic(error: RuntimeError) -> bool:
    """Whether this is PyTorch's error of an operation without a deterministic algorithm."""
    return "use_deterministic_algorithms" in str(error)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether this is PyTorch's error of a device that has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
