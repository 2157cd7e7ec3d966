"""The methods of `fedbayes fuse` by name: what each is, what it hears, and what does the work.

To add a method is to write its mathematics in `fusion/` and a row here. A method that makes one
`state_dict` of several has the job `averaging:networks`, or of posteriors `averaging:posteriors`,
and names its function as `merge`; its settings are options of the command by themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from fedbayes.fusion.posterior_settings import AveragingSettings, HeadSettings
from fedbayes.fusion.settings import (
    AdapterFunctionSettings,
    AdapterInputSettings,
    AdapterSettings,
    AdapterTaskSettings,
    AlignedSettings,
    FunctionSettings,
    TaskVectorSettings,
)
from fedbayes.inference.combination import Combination
from fedbayes.matching import MatchingSettings

NETWORK = ("model", "shape", "classes", "mean", "std")
"""Options that say which network files are of, and what goes into it."""
SELECTING = ("select", "grid", "max_neurons")
_FUNCTION = (
    *("like", "inputs", "sums", "width", "bound", "frontier", "test", "minutes", "posterior"),
    *("state", "show_inputs", "temperature_data"),
)
_WRITTEN = ("report", "picture")


@dataclass(frozen=True)
class FusionKind:
    """One row of the table."""

    summary: str
    """A phrase for the help."""
    job: str
    """`module:function` in `workflows/fuse/`: a `FusionJob` to what it made of it."""
    options: tuple[str, ...]
    """Fields of `FusionJob` that have an effect, of those that not all methods hear."""
    settings: type[BaseModel] | None = None
    """Its own; those that are no tables are options of the command too."""
    unheard: tuple[str, ...] = ()
    """Those of them that have an effect only on other methods with the same."""
    dense: str = ""
    """The job instead of that where all files are of fully connected networks."""
    merge: str = ""
    """`module:function` in `fusion/` that several rows with one job differ by."""
    programs: bool = False
    """Whether it can write a program of `torch.export`."""
    pages: bool = False
    """Whether its report can be a page in HTML."""

    @property
    def own(self) -> set[str]:
        """Names of its settings."""
        return set(self.settings.model_fields if self.settings else ()) - set(self.unheard)


_OF_POSTERIORS = "average weighted by files of fedbayes posterior"

FUSIONS: Mapping[str, FusionKind] = {
    "function": FusionKind(
        "distillation of the predictions of networks of any kind",
        "network_fusing:fuse_networks",
        ("counts", "seed", *NETWORK, *_FUNCTION, *_WRITTEN),
        FunctionSettings,
        programs=True,
        pages=True,
    ),
    "match": FusionKind(
        "matched units of networks with the same graph",
        "graph_fusing:fuse_graphs",
        ("counts", "seed", *NETWORK, *SELECTING, *_WRITTEN),
        MatchingSettings,
        dense="fusing:fuse_dense",
        programs=True,
    ),
    "gpi-fnm": FusionKind(
        "matched neurons of fully connected networks",
        "fusing:fuse_dense",
        ("counts", "seed", *SELECTING, *_WRITTEN),
        MatchingSettings,
    ),
    "pfnm": FusionKind(
        "the same without the KL term",
        "fusing:fuse_dense",
        ("counts", "seed", *SELECTING, *_WRITTEN),
        MatchingSettings,
    ),
    "combined": FusionKind(
        "weighted sum of fully connected networks, by sample sizes",
        "fusing:fuse_dense",
        ("counts", *SELECTING, *_WRITTEN),
        Combination,
    ),
    "average": FusionKind(
        "average of networks with the same graph",
        "averaging:networks",
        ("counts", *NETWORK, *SELECTING, *_WRITTEN),
        dense="fusing:fuse_dense",
        merge="combining:averaged",
    ),
    "regmean": FusionKind(
        f"{_OF_POSTERIORS}: inputs of layers",
        "averaging:posteriors",
        (),
        AveragingSettings,
        ("tolerance", "iterations"),
        merge="posteriors:regmean",
    ),
    "fisher": FusionKind(
        f"{_OF_POSTERIORS}: diagonal curvature",
        "averaging:posteriors",
        (),
        AveragingSettings,
        ("scaling", "tolerance", "iterations"),
        merge="posteriors:fisher",
    ),
    "kfac": FusionKind(
        f"{_OF_POSTERIORS}: Kronecker factors",
        "averaging:posteriors",
        (),
        AveragingSettings,
        ("scaling",),
        merge="posteriors:kfac",
    ),
    "gaussian-head": FusionKind(
        "a Gaussian head on shared layers, by files of fedbayes posterior --head",
        "averaging:posteriors",
        (),
        HeadSettings,
        merge="heads:gaussian_head",
    ),
    "ties": FusionKind(
        "trimmed changes since a common start, with the majority sign",
        "averaging:networks",
        ("counts", *NETWORK),
        TaskVectorSettings,
        ("drop_seed",),
        merge="task_vectors:ties",
    ),
    "dare": FusionKind(
        "changes since a common start, most of them dropped at random",
        "averaging:networks",
        ("counts", *NETWORK),
        TaskVectorSettings,
        merge="task_vectors:dare",
    ),
    "permute": FusionKind(
        "average of aligned units",
        "averaging:networks",
        ("counts", "seed", *NETWORK, "inputs", "sums"),
        AlignedSettings,
        merge="permutation:permuted",
    ),
    "c2m3": FusionKind(
        "the same, with all networks aligned at once",
        "averaging:networks",
        ("counts", "seed", *NETWORK, "inputs", "sums"),
        AlignedSettings,
        merge="cycles:c2m3",
    ),
}
"""Every method by its name."""


_ADAPTERS = "adapter_fusing:fuse_adapters"
ADAPTERS: Mapping[str, FusionKind] = {
    "function": FusionKind(
        "least squares on the inputs of layers, at the wanted rank",
        _ADAPTERS,
        ("counts", "seed", "inputs", "sums", "minutes"),
        AdapterFunctionSettings,
        merge="low_rank:least_squares",
    ),
    "regmean": FusionKind(
        "the same, truncated to the rank, without inputs",
        _ADAPTERS,
        ("counts", "seed", "inputs", "sums"),
        AdapterInputSettings,
        merge="low_rank:regmean",
    ),
    "svd": FusionKind(
        "mean of B A, truncated to the rank",
        _ADAPTERS,
        ("counts",),
        AdapterSettings,
        merge="low_rank:svd",
    ),
    "cat": FusionKind(
        "exact mean of B A; its rank is the sum of the ranks",
        _ADAPTERS,
        ("counts",),
        merge="low_rank:cat",
    ),
    "linear": FusionKind(
        "sums of A and of B weighted by square roots of shares, as in PEFT",
        _ADAPTERS,
        ("counts",),
        merge="low_rank:linear",
    ),
    "average": FusionKind("means of A and of B", _ADAPTERS, ("counts",), merge="low_rank:average"),
    "ties": FusionKind(
        "TIES of B A, truncated to the rank",
        _ADAPTERS,
        ("counts",),
        AdapterTaskSettings,
        ("drop_seed",),
        merge="low_rank:ties",
    ),
    "dare": FusionKind(
        "DARE of B A, truncated to the rank",
        _ADAPTERS,
        ("counts",),
        AdapterTaskSettings,
        merge="low_rank:dare",
    ),
}
"""Every method of LoRA adapters by its name; those of `FUSIONS` with the same one are of whole
networks."""


def hearers(name: str, methods: Mapping[str, FusionKind] = FUSIONS) -> list[str]:
    """Methods that hear an option or a setting."""
    return [method for method, kind in methods.items() if name in {*kind.options, *kind.own}]
