"""Rounds of federated averaging in other frameworks and in fedbayes, side by side.

    python benchmarks/frameworks.py [--workloads mlp,tiny] [--only ours,pfl] [--cache DIR]

Three workloads, each with the same network, first weights, clients, batches and SGD for all, one
epoch a round: `mlp` and `lenet5` as in `pfl_speed.py`, and `tiny`, 10,000 clients of 20 rows of
8 × 8 digits, 50 a round. Each framework has a virtual environment below `--cache`, which the first
run installs (`PINS`), and a side in `benchmarks/frameworks/`, which uses it as its documentation
recommends. Nothing evaluates. Frameworks alternate, and medians over `--times` turns are printed.

A turn starts the side, lets it train `WARM` rounds and then counts rounds for `--seconds`. Of the
process tree the driver measures processor seconds (with children that have ended) and the peak
of memory (proportional set size, twice a second). *start* is until the first round has ended,
*loss* of `WARM` rounds' model on 2,000 rows, *bits* whether its weights are the same in all turns.
Bytes are those that a side itself counts; most frameworks hand over models in memory. A framework
that cannot run says why. Where other programs hold the cores, seconds say little, and threads of
other frameworks spin: `--threads 1` and processor seconds then tell more.

Needs the data (FEDBAYES_DATA, or the hub). PFLlib, which has no package, is cloned with git.
BlazeFL needs Python 3.12 and recommends 3.14 without the global lock: see `--python`.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).with_suffix("")))

import fedbayes_side
import pfl_speed
from side import Workload

from fedbayes import Simulation

HERE = Path(__file__).with_suffix("")
WARM = 3
TORCH = "torch==2.13.0"
PINS = {
    "flower": ("flwr[simulation]==1.42.0", TORCH),
    "pfl": ("pfl==0.6.0", TORCH),
    "fluke": ("fluke-fl==0.8.1", TORCH),
    "blazefl": (
        "blazefl[contrib,reproducibility]==3.0.0; python_version >= '3.14'",
        "blazefl[contrib,reproducibility]==2.0.3; python_version < '3.14'",
        TORCH,
    ),
    "fedjax": (  # of 2023: what JAX was then
        "fedjax==0.0.17",
        "jax==0.4.25",
        "jaxlib==0.4.25",
        "dm-haiku==0.0.12",
        "optax==0.2.2",
        "chex==0.1.86",
        "numpy<2",
        "scipy<1.13",
    ),
    "pfllib": (TORCH, "numpy", "scikit-learn", "h5py", "matplotlib"),
}
"""What the environment of each framework has."""
PFLLIB = ("https://github.com/TsingZ0/PFLlib", "d832e76f6a23b833038949ec1e4fdefe63a4d350")
PYTHONS = {"blazefl": ("python3.14t", "python3.14", "python3.13", "python3.12")}
"""Interpreters to look for; of others the one that runs this."""
OURS = {f"ours-{name}": name for name in ("sequential", "stacked", "workers", "ray")}
CASES = {
    **{name: pfl_speed.CASES[name] for name in ("mlp", "lenet5")},
    "tiny": {
        "data": {"clients": 10_000},
        "model": {"name": "mlp", "hidden": [32]},
        "cohort": 50,
        "batch_size": 10,
    },
}


class Unable(Exception):
    """Why a framework has no numbers."""


def digits(file, clients, rows=25):
    """Write rows of the digits for so many clients, drawn with replacement (a fifth are tests)."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    drawn = np.random.default_rng(0).integers(0, len(y), clients * rows)
    np.savez(file, x=(x[drawn] / 16).astype(np.float32), y=y[drawn].astype(np.int64))


def prepare(name, case, folder):
    """Write a workload for all sides, with the clients of ours."""
    data = dict(case["data"])
    if name == "tiny":
        digits(folder / "digits.npz", data["clients"])
        data["path"] = str(folder / "digits.npz")
    found = {
        **{key: case[key] for key in ("model", "cohort", "batch_size")},
        **{"name": name, "data": data, "clients": data["clients"]},
        **{"rate": pfl_speed.RATE, "warm": WARM, "folder": str(folder)},
    }
    file = folder / "workload.json"
    file.write_text(json.dumps(found))
    work = Workload(file)
    with Simulation(fedbayes_side.settings(work, "sequential", 1), folder / "run") as simulation:
        own = [simulation.data.train(client) for client in range(work.clients)]
        for part in ("x", "y"):
            np.save(folder / part, torch.cat([getattr(one, part) for one in own]).numpy())
        np.save(folder / "starts", np.cumsum([0, *(len(one.y) for one in own)]))
        initial = [value.numpy() for value in simulation.network.initial.values()]
        np.savez(folder / "initial", *initial)
    return work, file


def environment(name, cache, given):
    """The interpreter of a framework, whose environment is made where there is none."""
    home = cache / name
    python = home / "bin" / "python"
    pins = json.dumps(PINS[name])
    done = home / "installed.json"
    if not (done.exists() and done.read_text() == pins):
        looked = (given,) if given else PYTHONS.get(name, (sys.executable,))
        base = next((path for path in map(shutil.which, looked) if path and runs(path)), None)
        if base is None:
            raise Unable(f"needs one of {', '.join(looked)}; name one by --python {name}=PATH")
        shutil.rmtree(home, ignore_errors=True)
        print(f"installing {name} into {home}", file=sys.stderr)
        checked([base, "-m", "venv", home])
        checked([python, "-m", "pip", "install", "-q", *PINS[name]])
        if name == "pfllib":
            source, commit = PFLLIB  # its history has hundreds of MB of data
            checked(["git", "clone", "-nq", "--filter=blob:none", source, home / "PFLlib"])
            checked(["git", "-C", home / "PFLlib", "checkout", "-q", commit, "--", "system"])
        done.write_text(pins)
    return python


def runs(python):
    return not subprocess.run([python, "-c", ""], capture_output=True).returncode


def checked(command):
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise Unable(f"cannot be installed: {last_line(found.stderr)}")


def last_line(text):
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no word")[:160]


def command(name, file, cache, pythons):
    """What starts a side."""
    if name in OURS:
        return [sys.executable, HERE / "fedbayes_side.py", file, OURS[name]]
    python = environment(name, cache, pythons.get(name))
    return [python, HERE / f"{name}_side.py", file, cache / name / "PFLlib"]


class Tree:
    """The processes of a side: what they use, and their end."""

    def __init__(self, process):
        self.main, self.seen, self.peak = psutil.Process(process.pid), {}, 0
        threading.Thread(target=self.watch, daemon=True).start()

    def members(self):
        with suppress(psutil.Error):
            for one in [self.main, *self.main.children(recursive=True)]:
                self.seen[one.pid] = one
                yield one

    def watch(self):
        while self.main.is_running():
            total = 0
            for one in self.members():
                with suppress(psutil.Error):
                    total += one.memory_full_info().pss
            self.peak = max(self.peak, total)
            time.sleep(0.5)

    def seconds(self):
        """Of processors so far, also those of children that have ended."""
        total = 0.0
        for one in self.members():
            with suppress(psutil.Error):
                total += sum(one.cpu_times()[:4])
        return total

    def end(self):
        list(self.members())
        for one in list(self.seen.values()):
            with suppress(psutil.Error):
                one.send_signal(signal.SIGKILL)


def turn(start, work, seconds, patience, threads=None):
    """Train for a while; what a row of the table tells."""
    variables = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if start[0] != sys.executable:
        variables.pop("PYTHONPATH", None)
        variables |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    model = Path(work.folder, "model.npz")
    model.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="fw", ignore_cleanup_errors=True) as place:
        errors = Path(place, "errors")
        began = time.perf_counter()
        with errors.open("w") as stream:
            process = subprocess.Popen(
                [str(part) for part in start],
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                cwd=place,
                env=variables | {"TMPDIR": place, "FLWR_TELEMETRY_ENABLED": "0"},
            )
        tree = Tree(process)
        late = threading.Timer(patience, tree.end)
        late.start()
        ends, sent, spent = [], "", []
        try:
            for line in process.stdout:
                if not line.startswith("@round "):
                    continue
                ends.append(time.perf_counter())
                sent = line.removeprefix("@round ").strip()
                if len(ends) == WARM:
                    spent.append(tree.seconds())
                elif len(ends) > WARM + 1 and ends[-1] - ends[WARM - 1] >= seconds:
                    spent.append(tree.seconds())
                    break
        finally:
            tree.end()
            late.cancel()
            process.wait()
        if len(spent) < 2:
            known = last_line(errors.read_text(errors="replace"))
            slow = f"{len(ends)} rounds in {patience:.0f} s"
            raise Unable(slow if time.perf_counter() - began >= patience else known)
    weights = [np.array(value) for value in np.load(model).values()]
    rounds = len(ends) - WARM
    return {
        "a second": rounds / (ends[-1] - ends[WARM - 1]),
        "processor": (spent[1] - spent[0]) / rounds,
        "memory": tree.peak / 2**20,
        "start": ends[0] - began,
        "sent": sent,
        "loss": loss(work, weights),
        "bits": hashlib.sha256(b"".join(value.tobytes() for value in weights)).hexdigest(),
    }


def loss(work, weights):
    """The mean loss of these weights on the first 2,000 rows."""
    network = work.network()
    pairs = zip(network.state_dict(), map(torch.from_numpy, weights), strict=True)
    network.load_state_dict(dict(pairs))
    x, y = (np.load(f"{work.folder}/{part}.npy", mmap_mode="r")[:2000] for part in ("x", "y"))
    with torch.no_grad():
        outputs = network(torch.from_numpy(np.array(x)))
    return float(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(np.array(y))))


def measure(name, case, names, given, pythons):
    """Turns of all frameworks at a workload, in turn; a reason in place of a framework's turns."""
    with tempfile.TemporaryDirectory() as folder:
        work, file = prepare(name, case, Path(folder))
        found = {one: [] for one in names}
        for _ in range(given.times):
            for one in names:
                if isinstance(found[one], str):
                    continue
                try:
                    start = command(one, file, given.cache, pythons)
                    seconds, patience, threads = given.seconds, given.patience, given.threads
                    found[one].append(turn(start, work, seconds, patience, threads))
                except Unable as reason:
                    found[one] = str(reason)
    return found


def show(name, found):
    """A table of a workload: times and memory also relative to the workers' engine."""
    middle = {
        one: {key: statistics.median(turn[key] for turn in turns) for key in COLUMNS}
        for one, turns in found.items()
        if not isinstance(turns, str)
    }
    base = middle.get("ours-workers") or next(iter(middle.values()), None)
    print(f"\n{name:16}" + "".join(f"{key:>16}" for key in COLUMNS) + f"{'sent':>12}  bits")
    for one, turns in found.items():
        if isinstance(turns, str):
            print(f"{one:16} {turns}")
            continue
        cells = [
            f"{form.format(middle[one][key])} ({middle[one][key] / base[key]:.2f})"
            for key, form in COLUMNS.items()
        ]
        same = "same" if len({turn["bits"] for turn in turns}) == 1 else "differ"
        print(f"{one:16}" + "".join(f"{cell:>16}" for cell in cells), end="")
        print(f"{turns[-1]['sent']:>12}  {same if len(turns) > 1 else 'one turn'}", flush=True)


COLUMNS = {
    "a second": "{:.2f}",
    "processor": "{:.4f}",
    "memory": "{:.0f}",
    "start": "{:.1f}",
    "loss": "{:.4f}",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(CASES))
    parser.add_argument("--only", default=",".join([*OURS, *PINS]), help="which frameworks")
    parser.add_argument("--times", type=int, default=3, help="turns of each")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a turn counts rounds")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds of a whole turn")
    parser.add_argument("--threads", type=int, help="of each process of others, not its own way")
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/fedbayes-frameworks").expanduser()
    )
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    given = parser.parse_args()
    given.cache = given.cache.expanduser().absolute()
    pythons = dict(one.split("=", 1) for one in given.python)
    print(f"load {os.getloadavg()[0]:.1f} at the start", flush=True)
    for name in given.workloads.split(","):
        show(name, measure(name, CASES[name], given.only.split(","), given, pythons))
        print(f"load {os.getloadavg()[0]:.1f} after {name}", flush=True)


if __name__ == "__main__":
    main()
