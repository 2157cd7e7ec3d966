"""Memory and time of a round with 100 and with 10,000 clients, 50 a round.

    python benchmarks/many_clients.py

MNIST in 100 or 10,000 parts of 6 samples each. Memory is the peak, over the rounds, of the
proportional set size (shared pages counted once) of the whole process tree, each federation in a
process tree of its own. Time is the median over rounds. Needs MNIST.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROUNDS = 20


def tree_memory(process):
    import psutil

    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def child(clients, engine):
    """One federation: print its peak memory and its time per round."""
    import psutil

    from fedbayes import Config, Simulation

    config = Config.create(
        rounds=ROUNDS,
        cohort=50,
        engine=engine,
        evaluate_every=0,
        training={"batch_size": 6},
        data={
            "name": "mnist",
            "clients": clients,
            "partition": "iid",
            "limit": None if clients == 10_000 else 6 * clients,
            "min_samples": 1,
        },
    )
    process, peak, running = psutil.Process(), [0], [True]

    def watch():
        while running:
            peak[0] = max(peak[0], tree_memory(process))
            time.sleep(0.2)

    with (
        tempfile.TemporaryDirectory() as folder,
        Simulation(config, f"{folder}/run") as simulation,
    ):
        watcher = threading.Thread(target=watch)
        watcher.start()
        seconds = [step.metrics["seconds"] for step in simulation]
        running.clear()
        watcher.join()
    print(json.dumps({"peak": peak[0], "seconds": statistics.median(seconds[2:-1])}))


def main():
    for engine in ("sequential", "workers"):
        results = {}
        for clients in (100, 10_000):
            command = [sys.executable, __file__, str(clients), engine]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
            results[clients] = json.loads(output)
            print(
                f"{engine:10} {clients:6} clients  peak {results[clients]['peak'] / 2**20:7.0f} MiB"
                f"  {results[clients]['seconds'] * 1e3:6.1f} ms a round",
                flush=True,
            )
        few, many = results[100], results[10_000]
        print(
            f"{engine:10} ratio  memory {many['peak'] / few['peak']:.2f} (aim at most 1.50)"
            f"  time {many['seconds'] / few['seconds']:.2f} (aim about 1)",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(int(sys.argv[1]), sys.argv[2])
    else:
        main()
