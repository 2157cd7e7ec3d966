"""From a config to the things it names."""

from pathlib import Path

import torch

from fedbayes import models
from fedbayes.data import FederatedData, Partition, load_dataset, partition
from fedbayes.errors import ConfigError
from fedbayes.experiment.config import Config
from fedbayes.experiment.record import RunFolder
from fedbayes.federation.party import Party
from fedbayes.models import Network


def build_data(config: Config, division: Partition | None = None) -> FederatedData:
    """The clients' data, divided as given, or as the config says."""
    dataset = load_dataset(config.data)
    return FederatedData(
        dataset, division or partition(dataset, config.data, config.seed), config.seed
    )


def stored_data(config: Config, folder: RunFolder) -> FederatedData:
    """The clients' data as the run folder has them divided.

    The stored division is what counts: another version of a library may draw another one. Only
    a run that was killed before it was written divides anew.
    """
    if folder.partition_file.exists():
        return build_data(config, Partition.load(folder.partition_file))
    return build_data(config)


def build_party(config: Config, data: FederatedData) -> Party:
    """The clients of a federation, ready to work in this process."""
    device = choose_device(config.device)

    def network(client: int | None = None) -> Network:
        return models.build(
            config.model,
            data.dataset.shape,
            len(data.dataset.classes),
            seed=config.seed,
            client=client,
            device=device,
            precision=config.precision,
        )

    return Party(
        method=config.build_method(),
        network=network(),
        own_network=network,
        data=data,
        training=config.training,
        rounds=config.rounds,
        seed=config.seed,
    )


def party(folder: str) -> Party:
    """What a worker process runs: the party of a run folder."""
    run = RunFolder(Path(folder))
    config = run.config()
    return build_party(config, stored_data(config, run))


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is CUDA where there is any.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}") from None
    return device
