"""The same bits on every x86 CPU: what a process is started with, and how it then computes.

Kernels of PyTorch, MKL and NumPy differ by the instructions of the CPU and by the number of
threads, and round differently. A portable process takes the kernels for AVX2 alone, on one thread:

- PyTorch: its AVX2 kernels (`ATEN_CPU_CAPABILITY`), convolutions as matrix products. oneDNN is off,
  because it chooses the order of its sums by the size of the caches.
- MKL: conditional numerical reproducibility (`MKL_CBWR`), for matrix products and LAPACK.
- NumPy and SciPy: OpenBLAS's kernels for Haswell, and no loops for AVX-512.

The libraries read these variables when they start, so the process is started with them
(`VARIABLES`). More cores are used by more processes (engine workers), with the same bits.
"""

import os
import platform
import sys
from collections.abc import Callable

from fedbayes.errors import ConfigError

MARK = "FEDBAYES_BITS"
VARIABLES = {
    MARK: "portable",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2,STRICT",
    "OPENBLAS_CORETYPE": "Haswell",
    # Several versions of NumPy have different names; those that one does not have do nothing.
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_KNL AVX512_KNM AVX512_SKX AVX512_CLX "
    "AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The environment variables of a portable process."""


class NotPortableError(ConfigError):
    """The process was not started so that it computes the same bits on every CPU."""


def asked() -> bool:
    """Whether this process was started to compute portably (`FEDBAYES_BITS=portable`)."""
    return os.environ.get(MARK) == "portable"


def started() -> bool:
    """Whether all `VARIABLES` are set in this process."""
    return all(os.environ.get(name) == value for name, value in VARIABLES.items())


def inherited() -> dict[str, str]:
    """The variables by which a process that this one starts computes as it does."""
    return VARIABLES if asked() else {}


def restart() -> None:
    """Start this process again, with the same arguments, as a portable one."""
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, **VARIABLES})


def require_portable() -> None:
    """See that this process computes the same bits as on any other CPU.

    Raises:
        ConfigError: this machine cannot.
        NotPortableError: the process was started without the variables.
    """
    import torch

    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise ConfigError(
            f"bits = 'portable' needs an x86 CPU with AVX2, and this one is {platform.machine()}. "
            "Set bits = 'machine'"
        )
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "bits = 'portable' needs PyTorch with MKL, such as the x86 wheels on PyPI. Install "
            "one of these, or set bits = 'machine'"
        )
    if not started():
        words = " ".join(f"{name}='{value}'" for name, value in VARIABLES.items())
        raise NotPortableError(
            f"bits = 'portable' needs environment variables that Python reads at its start. Start "
            f"it with: env {words} python …"
        )
    level = torch.backends.cpu.get_cpu_capability()
    if level != "AVX2":
        raise ConfigError(
            f"bits = 'portable' needs a CPU with AVX2 and FMA, and PyTorch computes with {level} "
            "on this machine. Use another machine, or set bits = 'machine'"
        )


def use_threads(threads: int) -> Callable[[], None]:
    """Have this process compute with a number of threads, a portable one with a single thread.

    Args:
        threads: for PyTorch, and for matrix products of NumPy and SciPy.

    Returns:
        What puts the former numbers back.
    """
    import torch
    from threadpoolctl import threadpool_limits

    threads = 1 if asked() else threads
    before, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(threads)
    blas = threadpool_limits(threads, user_api="blas")
    if asked():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]

    def put_back() -> None:
        blas.restore_original_limits()
        torch.set_num_threads(before)
        torch.backends.mkldnn.enabled = onednn

    return put_back
