"""Baselines of one-shot fusion from a shared start: accuracies on the test set.

    python benchmarks/one_shot_baselines.py [--data mnist] [--model mlp] [--alpha 0.1] [--epochs 5]

Five clients train a network from one start on parts drawn by a Dirichlet distribution; then the
mean of the weights, RegMean, Fisher merging, Kronecker posteriors and permutation are tried beside
the clients alone and their ensembles. Seconds are those of fusing; those of the clients' posteriors
are in the last line. Runs go below `--out` and are read again.
"""

import argparse
import time
from pathlib import Path

import torch

import fedbayes
from fedbayes.config.config import Config
from fedbayes.fusion.combining import combine
from fedbayes.fusion.curvature import posterior
from fedbayes.fusion.permutation import permuted_average
from fedbayes.fusion.posterior_settings import AveragingSettings, CurvatureSettings
from fedbayes.fusion.posteriors import fisher, kfac, regmean
from fedbayes.fusion.teacher import Teacher
from fedbayes.runs.build import stored_data, stored_run
from fedbayes.runs.personal import own_models
from fedbayes.storage.folder import RunFolder


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", default="mnist")
    options.add_argument("--model", default="mlp")
    options.add_argument("--alpha", type=float, default=0.1)
    options.add_argument("--clients", type=int, default=5)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--limit", type=int, default=None, help="training samples in all")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--separate", action="store_true", help="starts of their own")
    options.add_argument("--precision", type=float, nargs="*", default=[None])
    options.add_argument("--scaling", type=float, nargs="*", default=[0.9])
    options.add_argument("--draws", type=int, default=None)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / ".one_shot")
    given = options.parse_args()
    start = "own" if given.separate else "common"
    config = Config.published(
        seed=given.seed,
        rounds=1,
        data={
            "name": given.data,
            "clients": given.clients,
            "partition": "dirichlet",
            "alpha": given.alpha,
        }
        | ({"limit": given.limit} if given.limit else {}),
        model={"name": given.model} | ({"hidden": [100, 100]} if given.model == "mlp" else {}),
        training={"optimizer": "sgd", "lr": 0.05, "epochs": given.epochs, "batch_size": 32},
        method={"name": "local", "start": start},
    )
    name = f"{given.data}-{given.model}-{given.alpha:g}-{given.clients}-{given.epochs}-{start}"
    path = given.out / f"{name}-{given.limit or 'all'}-{given.seed}"
    if not (path / "summary.json").exists():
        fedbayes.run(config, path)
    folder = RunFolder(path)
    data = stored_data(config, folder)
    run = stored_run(folder, config, data.preprocessing)
    network, test = run.network, data.test_union(0, data.test_total)

    def accuracy(function):
        with torch.no_grad():
            right = [function(x).argmax(-1) for x in test.x.split(1000)]
        return float((torch.cat(right) == test.y).float().mean())

    def of(weights):
        return lambda x: network(weights, x)

    models = [dict(weights) for _, weights in own_models(folder, config.build_method(), run)]
    counts = torch.as_tensor(data.counts(), dtype=torch.float32)
    n = counts.sum(1)
    alpha = (n / n.sum()).tolist()
    functions = [of(weights) for weights in models]

    def show(what, function, seconds=0.0):
        print(f"{what:32} {accuracy(function):.3f} {seconds:6.1f} s", flush=True)

    print(path.name, [int(k) for k in n])
    alone = [accuracy(one) for one in functions]
    print(f"{'locals, mean':32} {sum(alone) / len(alone):.3f}")
    show("ensemble, mean of probabilities", Teacher(functions))
    show("ensemble, class shares", Teacher(functions, counts / counts.sum(0).clamp_min(1)))
    show("average", of(combine(models, alpha)))
    begin = time.perf_counter()
    permuted = permuted_average(models, network.groups, alpha)
    show("permute", of(permuted.weights), time.perf_counter() - begin)
    print(f"{'  spread':32} {permuted.before:.4g} to {permuted.after:.4g}")
    begin = time.perf_counter()
    settings = CurvatureSettings(draws=given.draws)
    posteriors = []
    for client, weights in enumerate(models):
        network.module.load_state_dict(network.whole(weights))
        posteriors.append(posterior(network.module, run.likelihood, data.train(client), settings))
    spent = time.perf_counter() - begin
    for precision in given.precision:
        for what, fuse in (("fisher", fisher), ("kfac", kfac)):
            begin = time.perf_counter()
            fused = fuse(posteriors, AveragingSettings(precision=precision))
            show(
                what + ("" if precision is None else f", precision {precision:g}"),
                of(fused),
                time.perf_counter() - begin,
            )
        for scaling in given.scaling:
            begin = time.perf_counter()
            fused = regmean(posteriors, AveragingSettings(precision=precision, scaling=scaling))
            what = f"regmean, scaling {scaling:g}"
            what += "" if precision is None else f", {precision:g}"
            show(what, of(fused), time.perf_counter() - begin)
    print(f"posteriors of {given.clients} clients: {spent:.0f} s")


if __name__ == "__main__":
    main()
