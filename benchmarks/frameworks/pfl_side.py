"""pfl-research: one process with as many threads as there are cores."""

import torch
from side import Workload

if __name__ == "__main__":
    import pfl_speed

    work = Workload()
    torch.manual_seed(0)
    import numpy as np

    np.random.seed(0)  # noqa: NPY002  (which its sampler takes)
    network = work.network()
    clients = [work.tensors(client) for client in range(work.clients)]
    pfl_speed.federate(
        {"cohort": work.cohort, "batch_size": work.batch_size},
        clients,
        network,
        lambda: None,
        lambda: bool(work.ended(work.weights_of(network))),
    )
