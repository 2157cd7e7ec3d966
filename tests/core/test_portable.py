"""`bits = "portable"`: the same digest whatever kernels and threads a process is started with."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from fedbayes import Config, Simulation
from fedbayes.core import portable
from fedbayes.errors import ConfigError
from fedbayes.federation.engines.workers import environment

# Without the setting, convolutions differ in each of these processes.
SHORT = ["--clients", "3", "--rounds", "1", "--set", "bits=portable", "--set", "model.name=lenet5"]
SETTINGS = {"bits": "portable", "rounds": 1, "data": {"clients": 3}}


def digest(folder, *options, level="avx512", threads=1):
    """Of the model of a run in a process of its own, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "fedbayes", "run", *SHORT, *options, "--out", str(folder)],
        env=os.environ | {"ATEN_CPU_CAPABILITY": level, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    model = (folder / "model.safetensors").read_bytes()
    return hashlib.sha256(model).hexdigest(), done.stderr


@pytest.mark.slow
def test_kernels_and_threads_do_not_change_a_bit(tmp_path):
    one, _ = digest(tmp_path / "one")
    other, said = digest(tmp_path / "other", "--set", "threads=2", level="default", threads=2)
    assert one == other
    assert "threads = 2 has no effect, because bits = 'portable'" in " ".join(said.split())


@pytest.mark.slow
def test_every_engine_has_the_same_bits(tmp_path):
    found = {
        engine: digest(tmp_path / engine, "--engine", engine)[0]
        for engine in ("sequential", "workers", "ray", "flower-simulation")
    }
    assert len(set(found.values())) == 1, found


def test_a_process_that_was_not_started_so_is_told_how(tmp_path, monkeypatch):
    monkeypatch.delenv(portable.MARK, raising=False)
    with pytest.raises(portable.NotPortableError, match=r"env FEDBAYES_BITS='portable' .*MKL_CBWR"):
        Simulation(Config.create(**SETTINGS), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_comparison_starts_again_as_a_portable_one(tmp_path):
    given = ["--methods", "fedavg,local", "--seeds", "1", "--set", "bits=portable"]
    given += ["--set", "rounds=1", "--set", "data.clients=3", "-o", str(tmp_path / "c")]
    done = subprocess.run(
        [sys.executable, "-m", "fedbayes", "compare", *given], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": "cuda"}, "bits = 'portable' needs the CPU, and devices is cuda"),
        ({"precision": "bf16"}, "needs float32, and precision is 'bf16'"),
        ({"engine": "stacked"}, "engine is 'stacked'. Set engine = 'sequential'"),
    ],
)
def test_what_differs_by_machine_is_an_error(settings, words):
    with pytest.raises(ConfigError, match=words):
        Config.create(**SETTINGS | settings)


def test_a_cpu_without_avx2_is_an_error(monkeypatch):
    for name, value in portable.VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ConfigError, match="needs a CPU with AVX2 and FMA, and PyTorch computes"):
        portable.require_portable()
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(ConfigError, match="an x86 CPU with AVX2, and this one is arm64"):
        portable.require_portable()


def test_processes_that_it_starts_are_portable_too(monkeypatch):
    monkeypatch.delenv(portable.MARK, raising=False)
    assert environment(3)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv(portable.MARK, "portable")
    assert portable.VARIABLES.items() <= environment(3).items()


def test_it_computes_on_one_thread_and_without_onednn(monkeypatch):
    monkeypatch.setenv(portable.MARK, "portable")
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    put_back = portable.use_threads(3)
    try:
        assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == (1, False)
    finally:
        put_back()
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == before
