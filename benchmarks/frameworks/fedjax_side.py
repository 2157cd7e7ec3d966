"""FedJAX: one process; its backend `jit`, which compiles a client's step."""

import fedjax
import jax
import jax.numpy as jnp
from jax import lax
from side import Workload


def outputs(name, weights, x):
    """The networks of `side.py`, on weights in PyTorch's order and shapes."""
    weights = list(weights)
    while weights[0].ndim == 4:
        kernel, bias, *weights = weights
        x = lax.conv(x, kernel, (1, 1), "VALID") + bias[:, None, None]
        window = (1, 1, 2, 2)
        x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, window, window, "VALID")
    x = x.reshape(len(x), -1)
    while weights:
        matrix, bias, *weights = weights
        x = x @ matrix.T + bias
        x = jax.nn.relu(x) if weights else x
    return x


if __name__ == "__main__":
    work = Workload()

    def loss(weights, batch, rng):
        logits = jax.nn.log_softmax(outputs(work.name, weights, batch["x"]))
        return -jnp.take_along_axis(logits, batch["y"][:, None], axis=1).mean()

    data = {i: dict(zip("xy", work.client(i), strict=True)) for i in range(work.clients)}
    data = fedjax.InMemoryFederatedData(data)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(work.rate),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch_size, num_epochs=1, seed=0),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, work.cohort, seed=0)
    state = algorithm.init([jnp.asarray(one) for one in work.initial()])
    while True:
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        work.ended(lambda: state.params)  # noqa: B023
