"""What is found out about a run's network before the first round: which batches it can take, and
what its outputs look like.
"""

from collections.abc import Iterator, Sequence

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation
from fedbayes.core.wording import listed
from fedbayes.data import FederatedData
from fedbayes.errors import ModelError
from fedbayes.federation.client_runtime import calibrating, held_out_of, set_aside
from fedbayes.federation.engine_table import ENGINES
from fedbayes.models.settings import BUILT_IN, NAMES
from fedbayes.models.trials import alone, habits
from fedbayes.runs.calibration import held_out_share
from fedbayes.runs.evaluator import EVALUATION_ROWS


def check_batches(config: Config, method: AnyMethod, run: Federation, data: FederatedData) -> None:
    """See that the network can take every batch of one sample that the run will have.

    Raises:
        ModelError: it cannot; the text names the clients and the way out.
    """
    if config.model.name in BUILT_IN or not _sizes_known(config):
        return
    names = [data.names[client] for client in data.owners]
    sizes, tests = data.train_sizes().tolist(), data.test_sizes().tolist()
    if method.reports.pooled:
        names, sizes = ["all clients together"], [sum(sizes)]
    share = held_out_share(config, method, run.likelihood)
    chosen = calibrating(run)
    kept = []
    for client, count in enumerate(sizes):
        left = count - held_out_of(count, share if client in chosen else 0.0)
        kept.append(left - set_aside(left, config.training.validation))
    short = [(name, n) for name, n in zip(names, kept, strict=True) if _ends_alone(config, n)]
    if short and (why := alone(run.network, training=True)):
        raise ModelError(_told(config, short, why))
    if config.model.name not in NAMES and (why := alone(run.network, training=False)):
        small = [name for name, n in zip(data.names, tests, strict=False) if n == 1]
        if small or sum(tests) % EVALUATION_ROWS == 1:
            whose = f"client {listed(small, 3)}" if small else "the last batch of all test samples"
            raise ModelError(
                f"model {config.model.name!r} cannot be evaluated on a single test sample, as in "
                f"{whose}: {why}. Change data.test, or let forward take a batch of 1"
            )


def _sizes_known(config: Config) -> bool:
    """Whether it is known before the first round how many samples clients have."""
    return config.data.generator is None and ENGINES[config.engine].states != "remote"


def _ends_alone(config: Config, count: int) -> bool:
    """Whether a client with this number of training samples has a batch of one of them."""
    sizes, steps = config.training.batch_sizes(count), config.training.steps
    return 1 in sizes[:steps]


def _told(config: Config, short: Sequence[tuple[str, int]], why: str) -> str:
    """That clients have batches that the network cannot train on."""
    few = listed([f"{name} ({n:,} training sample{'s' * (n != 1)})" for name, n in short], 3)
    single = any(n == 1 for _, n in short)
    way = (
        "Leave such clients out with data.min_samples = 2"
        if single
        else "Set training.last_batch to 'drop' or 'merge', or choose another training.batch_size"
    )
    return (
        f"with training.batch_size = {config.training.batch_size}, {few} would have a batch of "
        f"one sample, and model {config.model.name!r} cannot train on it: "
        f"{why.partition('. Set training')[0]}. {way}"
    )


def remarks_on_network(config: Config, run: Federation) -> Iterator[str]:
    """What a user should know of a network of somebody's own, a sentence each."""
    if config.model.name in NAMES:
        return
    network, name = run.network, config.model.name
    bits = {"torch.float64": "takes twice the bytes of float32 in every message"}
    bits |= {"torch.bfloat16": "keeps 3 digits, so small training steps are rounded to zero"}
    bits |= {"torch.float16": "keeps 3 digits and overflows above 65,504"}
    if (kind := str(network.dtype)) in bits:
        yield (
            f"weights of model {name!r} are in {kind.removeprefix('torch.')}, which {bits[kind]}; "
            "inputs are converted to it. Call .float() in its factory for float32"
        )
    seen = habits(network)
    if run.likelihood.name in _OF_LOGITS and (seen.softmax or seen.sigmoid):
        layer = "Softmax" if seen.softmax else "Sigmoid"
        yield (
            f"model {name!r} seems to end in {layer}: its outputs are between 0 and 1, but the "
            f"likelihood {run.likelihood.name} takes logits and applies {layer} itself. Leave the "
            f"last {layer} out, because training is slow and probabilities are too uniform"
        )
    if seen.draws:
        yield (
            f"model {name!r} uses random numbers in evaluation, so its predictions differ between "
            "calls. Functional dropout needs training=self.training"
        )
    if seen.together:
        yield (
            f"the outputs of model {name!r} for a sample depend on the others in its batch in "
            "evaluation too, so predictions depend on which rows are predicted together"
        )
    if not _sizes_known(config) and alone(network, training=True):
        yield (
            f"model {name!r} cannot train on a batch of one sample. The numbers of samples of "
            "clients are not known yet; training.last_batch = 'merge' avoids such batches for "
            "clients with two or more samples"
        )


_OF_LOGITS = ("categorical", "bernoulli", "multilabel")
"""Likelihoods whose outputs are logits."""
