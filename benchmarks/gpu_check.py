"""Whether everything works on a GPU: one script, one line a check, and exit status 1 if one fails.

    python benchmarks/gpu_check.py                  # all of it: minutes on one GPU
    python benchmarks/gpu_check.py --device cpu --only methods likelihoods    # a trial without one

Runs on the device are compared with runs on the CPU: a GPU rounds differently, so that models
agree to a tolerance, and two runs on the same GPU agree in every bit. `waits` counts operations for
which the CPU waits: their number must not depend on the number of training steps. `steps` and
`rounds` print ratios, and cannot fail. MNIST is used if it is there (FEDBAYES_DATA), else digits.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import pandas as pd
import torch

from fedbayes import Config, FederatedClassifier, Simulation
from fedbayes.core.tensors import Samples
from fedbayes.errors import EngineError, ModelError
from fedbayes.methods import METHODS

DATA = {"name": "digits", "clients": 3, "limit": 300, "partition": "iid"}
TASKS = {
    "gaussian": ["age"],
    "student-t": ["age"],
    "quantile": ["age"],
    "poisson": ["visits"],
    "multilabel": ["fever", "cough"],
    "bernoulli": ["fever"],
    "categorical": ["fever"],
    "cox": ["days", "died"],
}
MNIST = {"name": "mnist"} if os.environ.get("FEDBAYES_DATA") else {}
CLOSE = 2e-3
"""Relative difference of a model on two devices after one short round."""
DISTILLED, CLOSE_IN_BF16 = ("fedfuse", "fedbe", "fedbe-sums"), 0.1
"""Methods whose server trains a network, on a GPU in bfloat16, and what may differ there."""


def config(device: str, **settings) -> Config:
    """Three clients with 300 digits, unless told otherwise."""
    base = {"data": DATA, "model": {"hidden": [16]}, "rounds": 2, "evaluate_every": 0}
    return Config.create(**base | {"devices": device} | settings)


def trained(given: Config, folder: Path | None = None, stop: int | None = None):
    """The model after the last round, or after `stop` rounds, on the CPU, and the accuracy."""
    with Simulation(given, folder) as simulation:
        for line in simulation:
            if stop is not None and line.number >= stop:
                break
        model = simulation.method.model(simulation.server, simulation.run)
        return {n: t.detach().cpu().double() for n, t in model.items()}


def distance(one, two) -> float:
    """Relative difference of two models."""
    if not one:
        return 0.0
    gap = sum(float((one[n] - two[n]).square().sum()) for n in one)
    size = sum(float(one[n].square().sum()) for n in one)
    return (gap / max(size, 1e-30)) ** 0.5


def same(one, two) -> bool:
    """Whether two models have the same bits."""
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


chosen = list(METHODS)
"""Methods to check."""


def methods(device: str) -> Iterator[tuple[str, bool, str]]:
    """Every method: like the CPU after a round, and twice the same bits."""
    for name in chosen:
        short = {"method": {"name": name}, "rounds": 1, "training": {"epochs": 1}}
        gap = distance(trained(config("cpu", **short)), trained(config(device, **short)))
        one, two = (trained(config(device, method={"name": name})) for _ in range(2))
        finite = all(bool(t.isfinite().all()) for t in one.values())
        yield (
            name,
            finite and gap < (CLOSE_IN_BF16 if name in DISTILLED else CLOSE) and same(one, two),
            (f"difference to the CPU {gap:.1e}; the same bits twice: {same(one, two)}"),
        )


def models(device: str) -> Iterator[tuple[str, bool, str]]:
    """Networks for images, in float32 and bf16."""
    for name in ("mlp", "lenet5") + (("resnet20",) if MNIST else ()):
        found = {}
        for precision in ("float32", "bf16"):
            settings = {
                "data": DATA | MNIST,
                "model": {"name": name},
                "precision": precision,
                "rounds": 1,
                "training": {"epochs": 1},
            }
            one, two = (trained(config(device, **settings)) for _ in range(2))
            found[precision] = one
            yield f"{name} {precision}", same(one, two), "the same bits twice"
        gap = distance(found["float32"], found["bf16"])
        yield f"{name} bf16 next to float32", 0 < gap < 0.2, f"difference {gap:.1e}"


def likelihoods(device: str) -> Iterator[tuple[str, bool, str]]:
    """Every likelihood on a table of three sites."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 4))
    frame = pd.DataFrame(x, columns=list("abcd"))
    frame["site"] = rng.choice(["north", "south", "west"], len(x))
    frame["age"] = 50 + 10 * x[:, 0] + 5 * rng.normal(size=len(x))
    frame["visits"] = rng.poisson(np.exp(1 + 0.5 * x[:, 2]))
    frame["fever"] = (x[:, 3] > 0).astype(int)
    frame["cough"] = (x[:, 1] > 0).astype(int)
    frame["days"] = np.ceil(100 * rng.exponential(np.exp(-0.5 * x[:, 0])))
    frame["died"] = (rng.random(len(x)) < 0.7).astype(int)
    with tempfile.TemporaryDirectory() as folder:
        for name, labels in TASKS.items():
            path = Path(folder) / f"{name}.csv"
            frame[[*"abcd", "site", *labels]].to_csv(path, index=False)
            settings = {
                "data": {"path": str(path), "group": "site", "label": labels},
                "task": {"likelihood": name},
                "rounds": 1,
                "training": {"epochs": 1},
            }
            gap = distance(trained(config("cpu", **settings)), trained(config(device, **settings)))
            yield name, gap < CLOSE, f"difference to the CPU {gap:.1e}"


def engines(device: str) -> Iterator[tuple[str, bool, str]]:
    """Worker processes and resumed runs: the same bits as one uninterrupted process."""
    for name in ("fedavg", "pvi", "scaffold"):
        plain = trained(config(device, method={"name": name}, rounds=3))
        apart = trained(
            config(device, method={"name": name}, rounds=3, engine="workers", workers=2)
        )
        yield f"{name} on workers", same(plain, apart), "the same bits as sequential"
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "run"
            trained(config(device, method={"name": name}, rounds=3), place, stop=1)
            yield f"{name} resumed", same(plain, trained(None, place)), "the bits of one go"


def _waits(device: str, **settings) -> Counter:
    """Where the CPU waited in the clients' training of one round, and how often."""
    with (
        Simulation(config(device, **settings)) as simulation,
        warnings.catch_warnings(record=True) as found,
    ):
        train = simulation.runtime.train

        def watched(task):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return train(task)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        object.__setattr__(simulation.runtime, "train", watched)
        next(iter(simulation))
        places = [one for one in found if "synchronizing" in str(one.message)]
        return Counter(f"{Path(one.filename).name}:{one.lineno}" for one in places)


def waits(device: str) -> Iterator[tuple[str, bool, str]]:
    """No training step waits for the GPU."""
    if not device.startswith("cuda"):
        yield "all", True, "not checked: it takes a GPU"
        return
    _waits(device)  # the first run on a device waits once more
    for name in chosen:
        training = {"lr": 0.01, "patience": None}  # patience looks at the loss after every epoch
        few, many = (
            _waits(device, method={"name": name}, training=training | {"epochs": epochs}, rounds=1)
            for epochs in (4, 8)
        )
        more = many - few
        yield name, not more, f"waits in 4 epochs {few.total()}, in 8 {many.total()} {dict(more)}"


def memory(device: str) -> Iterator[tuple[str, bool, str]]:
    """A device without memory gives an error that names it, or makes room."""
    if not device.startswith("cuda"):
        yield "full", True, "not checked: it takes a GPU"
        return
    total = torch.cuda.get_device_properties(device).total_memory
    layers = [4096, 4096]  # 17 million parameters, of 70 MB
    for what, room, error in (
        ("of the network", 50e6, ModelError),
        ("training", 250e6, EngineError),
    ):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(room / total)
        try:
            trained(config(device, model={"hidden": layers}, rounds=1))
            yield what, False, "no error"
        except Exception as found:
            yield what, isinstance(found, error), f"{type(found).__name__}: {found}"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    model = trained(config(device, rounds=1))
    yield "after it", bool(model), "trains again"


def estimators(device: str) -> Iterator[tuple[str, bool, str]]:
    """The scikit-learn estimator on the device, next to the CPU."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    given = {"n_clients": 3, "rounds": 2, "random_state": 0, "model": {"hidden": [16]}}
    one, two = (
        FederatedClassifier(**given, settings={"devices": place}).fit(x, y).predict_proba(x)
        for place in ("cpu", device)
    )
    gap = float(np.abs(one - two).max())
    yield "classifier", gap < 0.05, f"largest difference of a probability {gap:.1e}"


def rounds(device: str) -> Iterator[tuple[str, bool, str]]:
    """Rounds on the device next to the CPU."""
    data = {"clients": 20, "partition": "iid"} | (MNIST or {"name": "digits"})
    for model, settings in (
        ("mlp", {"hidden": [200, 200]}),
        ("lenet5", {}),
        *((("resnet20", {}),) if MNIST else ()),
    ):
        seconds = {}
        for place in ("cpu", device):
            given = config(
                place,
                data=data,
                model={"name": model, **settings},
                cohort=5,
                rounds=4,
                training={"epochs": 1, "batch_size": 64},
            )
            with Simulation(given) as simulation:
                times, began = [], time.perf_counter()
                for _ in simulation:
                    times.append(time.perf_counter() - began)
                    began = time.perf_counter()
            seconds[place] = statistics.median(times[1:])
        ratio = seconds[device] / seconds["cpu"]
        yield (
            f"round, {data['name']}, {model}",
            True,
            (f"{seconds[device]:.3f} s, on the CPU {seconds['cpu']:.3f} s: ratio {ratio:.2f}"),
        )


def steps(device: str) -> Iterator[tuple[str, bool, str]]:
    """Bayesian training steps next to plain ones."""
    sys.path.insert(0, str(Path(__file__).parent))
    from step_speed import samples, step

    from fedbayes.methods.fedavg import FedAvg
    from fedbayes.methods.fedgvi import FedGvi
    from fedbayes.methods.ivon_admm import IvonAdmm
    from fedbayes.methods.pvi import Pvi
    from fedbayes.models import MLP, LeNet5, Network

    place = torch.device(device)
    for label, module, shape in (
        ("MLP", MLP(784, (200,), 10), (1, 28, 28)),
        ("LeNet-5", LeNet5(3, 32, 32, 10), (3, 32, 32)),
    ):
        network = Network(module, shape=shape, device=place)
        batch = samples(256, *shape)
        batch = Samples(batch.x.to(place), batch.y.to(place))
        once = {m.__name__: step(m(), network, batch) for m in (FedAvg, Pvi, FedGvi, IvonAdmm)}
        times = {kind: [] for kind in once}
        for turn in range(30):
            for kind, run in once.items():
                began = time.perf_counter()
                run()
                if place.type == "cuda":
                    torch.cuda.synchronize()
                if turn > 4:
                    times[kind].append(time.perf_counter() - began)
        plain = statistics.median(times["FedAvg"])
        ratios = {kind: round(statistics.median(t) / plain, 2) for kind, t in times.items()}
        yield f"steps, {label}", True, f"{plain * 1e3:.2f} ms; ratios {ratios}"


CHECKS: dict[str, Callable[[str], Iterator[tuple[str, bool, str]]]] = {
    check.__name__: check
    for check in (methods, models, likelihoods, engines, waits, memory, estimators, steps, rounds)
}


def main() -> int:
    """Run the checks.

    Returns:
        The exit status: 1 if a check failed.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(chosen))
    given = parser.parse_args()
    chosen[:] = given.methods
    warnings.simplefilter("ignore")
    print(f"PyTorch {torch.__version__}, {torch.cuda.device_count()} GPUs", flush=True)
    if given.device.startswith("cuda"):
        print(torch.cuda.get_device_name(torch.device(given.device)), flush=True)
    failed = 0
    for name in given.only:
        began = time.perf_counter()
        checks = CHECKS[name](given.device)
        while True:
            try:
                what, good, detail = next(checks)
            except StopIteration:
                break
            except Exception:
                failed += 1
                print(f"FAIL {name}: {traceback.format_exc(limit=-4)}", flush=True)
                break
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {name}: {what}: {detail}", flush=True)
        print(f"     {name}: {time.perf_counter() - began:.0f} s", flush=True)
    print("go" if not failed else f"no-go: {failed} checks failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
