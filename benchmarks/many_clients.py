"""Start-up, memory and time of a round with a thousand, a hundred thousand and a million clients.

    python benchmarks/many_clients.py [--method fedavg] [--engines sequential,workers]

100 clients a round. A thousand and a hundred thousand clients share a table, 8 samples each; a
thousand and a million have samples of a function (`clients` below, with `data.generator`). Start-up
is until the first round can begin, memory the peak, until the run has ended, of the proportional
set size (shared pages counted once) of the whole process tree, each federation in a process tree of
its own. Time is the median over rounds. Nothing needs to be there beforehand.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROUNDS = 20
SAMPLES = 8
FEATURES = 20
HERE = Path(__file__).parent


def clients(client, seed):
    """Samples of a client: half-spaces that differ a little from client to client."""
    rng = np.random.default_rng([seed, client])
    x = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return x, (x[:, 0] + 0.3 * rng.normal() * x[:, 1] > 0).astype(np.int64)


def table(file, count):
    """Write the samples of so many clients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count * SAMPLES, FEATURES)).astype(np.float32)
    np.savez(file, x=x, y=(x[:, 0] > 0).astype(np.int64))


def tree_memory(process):
    import psutil

    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def child(kind, count, engine, method):
    """One federation: print its start-up, its peak memory and its time per round."""
    import psutil

    sys.path.insert(0, str(HERE))
    process, peak, running = psutil.Process(), [0], [True]

    def watch():
        while running:
            peak[0] = max(peak[0], tree_memory(process))
            time.sleep(0.2)

    with tempfile.TemporaryDirectory() as folder:
        data = {"generator": "many_clients:clients"}
        if kind == "table":  # made by another process, since memory is measured in this one
            file = f"{folder}/table.npz"
            made = f"import many_clients as m; m.table({file!r}, {count})"
            subprocess.run([sys.executable, "-c", made], check=True, cwd=HERE)
            data = {"path": file, "partition": "iid"}
        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.perf_counter()
        from fedbayes import Config, Simulation

        config = Config.published(
            rounds=ROUNDS,
            cohort=100,
            engine=engine,
            evaluate_every=0,
            method={"name": method},
            model={"hidden": [32]},
            training={"batch_size": SAMPLES},
            data={"clients": count, **data},
        )
        with Simulation(config, f"{folder}/run") as simulation:
            start = time.perf_counter() - began
            seconds = [step.metrics["seconds"] for step in simulation]
        files = sum(1 for path in Path(folder, "run").rglob("*") if path.is_file())
        running.clear()
        watcher.join()
    found = {"start": start, "peak": peak[0], "seconds": statistics.median(seconds[2:-1])}
    print(json.dumps(found | {"last": seconds[-1], "files": files}))


def show(engine, kind, count, start, peak, seconds, last, files):
    print(f"{engine:10} {kind:8} {count:>9} {start:>9} {peak:>9} {seconds:>9} {last:>9} {files:>6}")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--engines", default="sequential,workers")
    parser.add_argument("--child", nargs=3)
    given = parser.parse_args()
    if given.child:
        kind, count, engine = given.child
        child(kind, int(count), engine, given.method)
        return
    # The last round evaluates the global model: of a table on the test rows of all its clients.
    show("engine", "data", "clients", "start-up", "memory", "round", "last", "files")
    for engine in given.engines.split(","):
        for kind, counts in (("table", (1_000, 100_000)), ("function", (1_000, 1_000_000))):
            results = []
            for count in counts:
                command = [sys.executable, __file__, "--child", kind, str(count), engine]
                command += ["--method", given.method]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                found = json.loads(output)
                results.append(found)
                show(
                    *(engine, kind, f"{count:,}", f"{found['start']:.1f} s"),
                    *(f"{found['peak'] / 2**20:.0f} MiB", f"{found['seconds'] * 1e3:.0f} ms"),
                    *(f"{found['last'] * 1e3:.0f} ms", found["files"]),
                )
            few, many = results
            keys = ("start", "peak", "seconds", "last", "files")
            show(engine, kind, "ratio", *(f"{many[key] / few[key]:.2f}" for key in keys))


if __name__ == "__main__":
    main()
