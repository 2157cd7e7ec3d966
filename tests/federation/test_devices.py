"""Where clients compute: several devices, samples that stay there, and no step that waits.

No GPU is at hand where these run: the ways of the code are tried on the CPU, by several names.
"""

import platform
import re
import resource
import subprocess
import sys
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedbayes import Config, Simulation
from fedbayes.contracts import About
from fedbayes.core.devices import choose_device, find_devices, placed, repeatable
from fedbayes.core.tensors import Samples
from fedbayes.errors import ConfigError, EngineError, FedbayesWarning, ModelError
from fedbayes.federation.engines import workers
from fedbayes.federation.resident import DeviceCache
from fedbayes.methods import METHODS
from fedbayes.methods.fedavg import FedAvg
from fedbayes.testing import assert_identical
from tests.helpers.cases import cases

DATA = {"name": "digits", "clients": 3, "limit": 150, "partition": "iid"}


def config(**settings):
    return Config.published(
        **{"data": DATA, "model": {"hidden": [8]}, "rounds": 3, "evaluate_every": 0, **settings}
    )


def model_of(simulation):
    list(simulation)
    return simulation.method.model(simulation.server, simulation.run)


def test_device_is_the_older_name_of_devices():
    assert Config.create(device="cuda:1").devices == ("cuda:1",)
    assert config(devices="cuda:0,cuda:1").devices == ("cuda:0", "cuda:1")
    assert config(devices=["cuda:0", "cuda:1"]).device == "cuda:0"
    assert Config.create().device == "cpu"
    with pytest.raises(ConfigError, match="former name of devices"):
        Config.create(device="cpu", devices="cpu")
    with pytest.raises(ConfigError, match=r"devices is \[\]; give at least one"):
        Config.create(devices=[])


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("cpu", "cdua"), "'cdua' (did you mean 'cuda'?)"),
        (("gpu",), "'gpu' (did you mean 'cuda'?)"),
        (("cuda:x",), "'cuda:x'. Choose cpu, auto, cuda"),
        (("cpu", "cpu", "meta"), "several kinds (cpu, meta), which round differently"),
        (("meta",), "'meta' cannot be used"),
    ],
)
def test_devices_that_cannot_be_used_are_refused_before_there_is_a_folder(tmp_path, devices, said):
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=re.escape(said)):
        Simulation(config(devices=devices, engine="workers"), folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("gpus", "asked", "said"),
    [
        (0, "cuda", "PyTorch finds no GPU"),
        (1, "cuda:1", "PyTorch finds one GPU, cuda:0"),
        (4, "cuda:7", "PyTorch finds 4 GPUs, cuda:0 to cuda:3"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(monkeypatch, gpus, asked, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=f"device '{asked}' cannot be used: {said}"):
        find_devices(["cpu", asked])


def test_auto_is_every_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_devices(["auto"]) == (torch.device("cpu"),)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device) for device in find_devices(["auto"])] == ["cuda:0", "cuda:1"]
    assert find_devices(["cuda"]) == (torch.device("cuda", 0),)  # CUDA asks for a number


def test_a_device_without_memory_says_so(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ConfigError, match="device 'cpu' has no memory left"):
        choose_device("cpu")


def test_workers_take_devices_in_turn(monkeypatch):
    class Placed:
        def __init__(self, factory, argument, threads, device):
            self.device = device

    monkeypatch.setattr(workers, "_Worker", Placed)
    engine = workers.Workers("a:b", "", workers=5, devices=["cuda:0", "cuda:1"])
    assert Counter(engine.devices) == {"cuda:0": 3, "cuda:1": 2}
    assert engine.devices[:3] == ["cuda:0", "cuda:1", "cuda:0"]


def test_devices_that_nobody_computes_on_are_told_of():
    with pytest.warns(FedbayesWarning, match="engine 'auto' uses only the first"):
        Simulation(config(devices=["cpu", "cpu"])).close()
    with pytest.warns(FedbayesWarning, match=r"1 workers use only the first 1\. Set"):
        Simulation(config(devices=["cpu", "cpu"], engine="workers", workers=1)).close()
    with pytest.warns(FedbayesWarning, match="deterministic has no effect: it works only on GPUs"):
        Simulation(config(deterministic=False)).close()


def sized(number):
    return Samples(torch.zeros(number, dtype=torch.uint8), torch.zeros(0))


@given(st.lists(st.integers(1, 9)), st.integers(0, 20))
def test_what_was_not_used_for_longest_goes_first(asked, budget):
    """Samples of key k have k bytes. Against a list in the order of use, cut from the front."""
    resident, gathered = DeviceCache(torch.device("cpu"), budget), []
    order, missed = OrderedDict(), []
    for key in asked:
        found = resident.get(key, lambda key=key: gathered.append(key) or sized(key))
        assert len(found.x) == key
        if key in order:
            order.move_to_end(key)
        else:
            missed.append(key)
            if key <= budget:
                order[key] = None
        while sum(order) > budget:
            order.popitem(last=False)
        assert resident.held == sum(order) <= budget
    assert gathered == missed
    assert resident.release() == bool(order)
    assert resident.held == 0


def test_samples_are_copied_to_a_device_once():
    resident = DeviceCache(torch.device("meta"), 100)
    first = resident.get("a", lambda: sized(4))
    assert first.x.device.type == first.y.device.type == "meta"
    assert resident.get("a", lambda: pytest.fail("gathered again")) is first


@pytest.mark.parametrize(("budget", "times"), [(0, 3), (1, 1)])
def test_clients_samples_are_gathered_once_where_they_may_stay(monkeypatch, budget, times):
    """Three rounds of all three clients; what comes out is the same."""
    with Simulation(config()) as simulation:
        wanted = model_of(simulation)
    with Simulation(config(data_cache=budget)) as simulation:
        gathered, data = Counter(), simulation.data
        train, test = data.train, data.test
        monkeypatch.setattr(data, "train", lambda c: gathered.update([("train", c)]) or train(c))
        monkeypatch.setattr(data, "test", lambda c: gathered.update([("test", c)]) or test(c))
        assert_identical(wanted, model_of(simulation))
    assert gathered == {(part, c): times for part in ("train", "test") for c in range(3)}


class Hungry(FedAvg):
    """A method for which there is too little memory, so often."""

    name = "hungry"
    about = About("has too little memory")
    times: int = 1

    def local(self, message, client, data, site):
        FAILED.append(site.client)
        if FAILED.count(site.client) <= self.times:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().local(message, client, data, site)


FAILED = []


@pytest.mark.parametrize(("budget", "times"), [(1, 2), (0, 1)])
def test_a_client_that_a_device_has_no_memory_for_is_named(budget, times):
    FAILED.clear()
    hungry = {"name": f"{__name__}:Hungry", "times": times}
    with (
        Simulation(config(method=hungry, data_cache=budget)) as simulation,
        pytest.raises(EngineError, match=r"client 0: cpu is out of memory in round 1\. Use fewer"),
    ):
        list(simulation)
    assert [0] * times == FAILED


def test_samples_that_are_kept_make_room():
    FAILED.clear()
    hungry = {"name": f"{__name__}:Hungry"}
    with Simulation(config(method=hungry, data_cache=1)) as simulation:
        found = model_of(simulation)
    with Simulation(config()) as simulation:
        assert_identical(model_of(simulation), found)


class Random(FedAvg):
    """A method whose operation has no deterministic algorithm."""

    name = "random"
    about = About("varies")

    def local(self, message, client, data, site):
        raise RuntimeError(
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism"
        )


def test_an_operation_that_varies_is_named():
    with (
        Simulation(config(method={"name": f"{__name__}:Random"})) as simulation,
        pytest.raises(ModelError, match="cumsum_cuda_kernel is not deterministic"),
    ):
        list(simulation)


def test_gpus_are_made_repeatable_and_put_back(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    gpu = torch.device("cuda:1")
    put_back = repeatable(gpu, True)
    assert torch.are_deterministic_algorithms_enabled()
    put_back()
    assert not torch.are_deterministic_algorithms_enabled()
    repeatable(gpu, False)()
    assert current == [gpu, gpu]
    assert not torch.are_deterministic_algorithms_enabled()
    assert workers.environment(1)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_copies_to_a_gpu_are_pinned_and_waited_for_by_nobody(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append("pinned") or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *place, **how: asked.append((place, how)) or self
    )
    gpu = torch.device("cuda")
    placed(torch.zeros(1), gpu)
    assert asked == ["pinned", ((gpu,), {"non_blocking": True})]


class Readings(TorchDispatchMode):
    """Counts how often a value is read off a device, for which one waits. Optimizers of PyTorch
    count their steps on the CPU, wherever the parameters are: those are not counted.
    """

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += not any("/torch/optim/" in name for name in files_above())
        return function(*args, **(kwargs or {}))


def files_above():
    """Files of the functions under way."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
@pytest.mark.parametrize("method", cases(METHODS, slow={*METHODS} - {"fedavg", "fedsparse"}))
def test_no_step_of_training_waits_for_the_device(method):
    """What is read off it in a client's round does not depend on the number of steps."""
    read = []
    for epochs in (4, 8):
        settings = {"method": {"name": method}, "training": {"epochs": epochs, "lr": 0.01}}
        if method == "fedpa":
            settings["method"] |= {"burn_in_rounds": 0, "shrinkage": 0.1}
        with Simulation(config(**settings)) as simulation:
            train, count = simulation.runtime.train, Readings()

            def watched(task, train=train, count=count):
                with count:
                    return train(task)

            object.__setattr__(simulation.runtime, "train", watched)
            next(iter(simulation))
        read.append(count.count)
    assert read[0] == read[1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are as they are")
@pytest.mark.slow
def test_memory_that_a_step_frees_is_kept_for_the_next():
    """Of 32 MB that the first step frees, all stay with the process; without it, none."""
    code = (
        "import sys, torch\n"
        "from fedbayes.core.devices import choose_device\n"
        "if sys.argv[1] == 'started': choose_device('cpu')\n"
        "x = torch.ones(1 << 20)\n"
        "def resident():\n"
        "    with open('/proc/self/statm') as file: return int(file.read().split()[1])\n"
        "def step(): kept = [x + i for i in range(8)]; return resident()\n"
        "print(step() - resident())\n"
    )
    given_back = {}
    for how in ("started", "as it is"):
        command = [sys.executable, "-c", code, how]
        given_back[how] = int(subprocess.run(command, capture_output=True, check=True).stdout)
    pages = (8 << 22) // resource.getpagesize()
    assert given_back["started"] < pages / 8
    assert given_back["as it is"] > pages * 3 / 4
