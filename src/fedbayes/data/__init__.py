"""Data sets, their partition among clients, and what each client holds.

`load_dataset` gives one pool of samples, `partition` divides its rows among clients, and
`FederatedData` hands out the samples of a client as tensors. Heavy libraries, PyTorch too, are
imported where they are used, so that this package is quick to import.

A new data set is a reader in `sources/` and a row of `known.py`; a new partition is a function in
`schemes.py`. The rows that a seed gives to a client must stay as they are. Nothing here knows
networks. A federation may have a million clients: keep nothing of a client that nobody asks for.
"""

from typing import TYPE_CHECKING

from fedbayes.core.lazy import attributes
from fedbayes.data.catalogue import catalogue, load_dataset
from fedbayes.data.dataset import Dataset
from fedbayes.data.differences import differences
from fedbayes.data.known import Entry
from fedbayes.data.partition import Partition, partition
from fedbayes.data.schemes import choose_scheme
from fedbayes.data.settings import DataSettings

if TYPE_CHECKING:
    from fedbayes.core.tensors import Samples
    from fedbayes.data.federated import FederatedData, pixel_order
    from fedbayes.data.plot import plot_partition
    from fedbayes.data.preprocessing import Preprocessing

__all__ = [
    "DataSettings",
    "Dataset",
    "Entry",
    "FederatedData",
    "Partition",
    "Preprocessing",
    "Samples",
    "catalogue",
    "choose_scheme",
    "differences",
    "load_dataset",
    "partition",
    "pixel_order",
    "plot_partition",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "fedbayes.core.tensors": "Samples",
        "fedbayes.data.federated": "FederatedData pixel_order",
        "fedbayes.data.plot": "plot_partition",
        "fedbayes.data.preprocessing": "Preprocessing",
    },
)
