"""Out-of-distribution inputs, to measure whether a model is uncertain of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbayes.core import seeds
from fedbayes.core.files import digest, read_bytes
from fedbayes.data import DataSettings, FederatedData, Preprocessing, load_dataset
from fedbayes.data.known import KNOWN
from fedbayes.data.sources.streams import FORMATS, Rows
from fedbayes.data.sources.tables import without
from fedbayes.errors import ConfigError, DataError, did_you_mean

KINDS = {
    "permuted": "the test images with permuted pixels, the same permutation for all",
    "inverted": "the test images, inverted",
    "noise": "images with uniform random pixels",
    "wide": "samples drawn from a Gaussian with the training mean and three times the deviation",
}
"""What is made without other data, by name."""
AUTO, NONE = "auto", "none"
_SHEET = ".xlsx#"
"""Between the name of an Excel file and that of its sheet."""
WIDTH = 3.0
"""Standard deviations that `wide` has for every one of the training rows."""


@dataclass(frozen=True)
class OodInputs:
    """Such inputs."""

    name: str
    """As in `KINDS`, or of a data set or a file."""
    x: Tensor
    """As a network sees them, float32 [n, ...]."""

    @property
    def what(self) -> str:
        """What they are, in words."""
        return KINDS.get(self.name, f"samples of {self.name}")


def check_foreign(asked: str) -> None:
    """See early that there may be such inputs.

    Raises:
        ConfigError: it is neither a name that is known nor a file.
    """
    known = (AUTO, NONE, *KINDS, *KNOWN)
    if asked in known:
        return
    path, _ = _file_and_sheet(asked)
    if path.suffix or "/" in asked:
        if not path.is_file():
            raise ConfigError(f"--ood {asked}: file not found")
        if not path.name.lower().endswith(FORMATS):
            raise ConfigError(f"--ood {asked}: give a file that ends in {', '.join(FORMATS)}")
        return
    raise ConfigError(
        f"--ood {asked} is unknown{did_you_mean(asked, known)}. Choose {', '.join(known)}, or a "
        f"file ({', '.join(FORMATS)})"
    )


def _file_and_sheet(asked: str) -> tuple[Path, str | None]:
    """A file, and the sheet that is asked for of an Excel file, as in `new.xlsx#May`."""
    path, mark, sheet = asked.partition(_SHEET)
    return (Path(path + mark[:-1]), sheet) if sheet else (Path(asked), None)


def foreign_file(asked: str) -> str:
    """Digest of the file that was asked for; empty if that is a name, or there is no such file."""
    path, _ = _file_and_sheet(asked)
    if asked in (AUTO, NONE, *KINDS, *KNOWN) or not path.is_file():
        return ""
    return digest(read_bytes(path))


def foreign_inputs(data: FederatedData, settings: DataSettings, asked: str) -> OodInputs | None:
    """Inputs that the model of a run was not trained on, as many as it has test samples at most.

    What is drawn depends on the run's seed alone, so methods with the same seed see the same.

    Args:
        data: of the run.
        settings: where data sets are.
        asked: as in `KINDS`, the name of a data set, a file of rows (with its sheet, as in
            `new.xlsx#May`); `auto`: `permuted` of images and `wide` of all else but texts; or
            `none`.

    Returns:
        None where none are asked for, or texts have none.

    Raises:
        ConfigError: such inputs are not for samples of this kind.
        DataError: a data set or a file cannot be read, or has samples of another shape.

    Examples:
        >>> from fedbayes.data import DataSettings, FederatedData, load_dataset, partition
        >>> from fedbayes.workflows.experiments.ood_inputs import foreign_inputs
        >>> settings = DataSettings(name="digits", clients=5)
        >>> dataset = load_dataset(settings)
        >>> data = FederatedData(dataset, partition(dataset, settings, seed=0), seed=0)
        >>> foreign_inputs(data, settings, "inverted").x.shape
        torch.Size([448, 1, 8, 8])
    """
    check_foreign(asked)
    seen, images = data.preprocessing, len(data.shape) == 3
    if asked == AUTO:
        asked = NONE if seen.tokens is not None or seen.ids else "permuted" if images else "wide"
    if asked == NONE:
        return None
    if asked == data.dataset.name:
        raise ConfigError(
            f"--ood {asked} is the training data of the models. Choose another data set"
        )
    if asked not in KINDS:
        return OodInputs(asked, _of_others(seen, settings, asked, data.test_total))
    if seen.tokens is not None:
        raise ConfigError(f"--ood {asked} has numbers, but these samples are texts. Give a file")
    if asked != "wide" and not images:
        raise ConfigError(
            f"--ood {asked} works only with images. For rows, choose wide or give a file"
        )
    return OodInputs(asked, _made(data, asked))


def _made(data: FederatedData, kind: str) -> Tensor:
    seen, rng = data.preprocessing, seeds.numpy_rng(data.seed, f"foreign {kind}")
    shape = (data.test_total, *seen.shape)
    if kind == "wide":
        return torch.from_numpy(WIDTH * rng.standard_normal(shape, np.float32))
    if kind == "permuted":
        x = data.test_union(0, data.test_total).x
        order = torch.from_numpy(rng.permutation(x[0, 0].numel()))
        return x.flatten(2)[..., order].reshape(x.shape)
    if kind == "noise":
        samples = torch.from_numpy(seen.scale * rng.random(shape, np.float32))
    else:
        samples = seen.scale - data.raw_test(0, data.test_total).float()
    return seen.standardize_(samples, may_miss=True)


def _of_others(seen: Preprocessing, settings: DataSettings, asked: str, most: int) -> Tensor:
    """Samples of another data set or file, as the network sees them."""
    if asked not in KNOWN:
        parts = []
        path, sheet = _file_and_sheet(asked)
        read = settings.model_copy(update={"decimal": "auto"})
        for piece in Rows(path, seen.table, most, sheet, settings=read, decimal=seen.decimal):
            known = without(piece.x, read.na_values) if seen.table else piece.x
            parts.append(seen.apply(known, foreign=True))
            if sum(map(len, parts)) >= most:
                break
        return torch.cat(parts)[:most]
    dataset = load_dataset(DataSettings(name=asked, dir=settings.dir))
    if dataset.permuted:
        raise DataError(
            f"--ood {asked}: its pixel order depends on the client. Use --ood permuted for "
            "another order of the test images' pixels"
        )
    if dataset.shape != seen.shape:
        raise DataError(
            f"--ood {asked} has samples of shape {dataset.shape}, but the model expects "
            f"{seen.shape}"
        )
    first = dataset.official_train or 0
    rows = np.arange(first, min(first + most, dataset.samples))
    return seen.apply(np.array(dataset.x[rows]), foreign=True)
