"""What clients may say of their tables: sums, which add over clients."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from fedbayes.core.brief import Brief
from fedbayes.core.files import write_beside
from fedbayes.core.plausible import (
    LARGEST,
    MOST_CATEGORIES,
    MOST_ROWS,
    PlausibleMoments,
    check_categories,
    check_moments,
    check_rows,
)
from fedbayes.core.wording import listed
from fedbayes.data.tables.summaries import read_as
from fedbayes.errors import DataError, did_you_mean, quoted

FORMAT = "fedbayes-sums-1"
ROUNDING = 1e-6
"""Part of a feature's mean square by which sums may contradict themselves, rounded as they are."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Sums(Brief):
    """Sums over the rows of a table, which can be added for several tables.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.inputs import Sums, sums_of
        >>> found = sums_of(np.array([[1.0], [3.0]] * 5), features=["age"])
        >>> isinstance(found, Sums), found.count, found.mean
        (True, 10, array([2.]))
    """

    count: int
    """Rows."""
    total: Vector
    """Σ x over rows [D]."""
    products: Vector
    """Σ x xᵀ over rows [D, D]."""
    features: tuple[str, ...]
    """Names of the D features; their numbers from 0 if they have none."""
    categories: Mapping[int, Mapping[float, int]] = field(default_factory=dict)
    """Of features that are categories, by index: how many rows have each value."""

    @property
    def mean(self) -> Vector:
        """Of each feature [D]."""
        return np.asarray(self.total / self.count)

    @property
    def covariance(self) -> Vector:
        """Of the rows themselves [D, D]: divided by their number."""
        return np.asarray(self.products / self.count - np.outer(self.mean, self.mean))

    @property
    def std(self) -> Vector:
        """Deviation of each feature [D]; 0 where it is constant, but for rounding."""
        variance = np.diag(self.covariance)
        floor = 1e-12 * np.diag(self.products) / self.count
        return np.asarray(np.sqrt(np.where(variance > floor, variance, 0.0)))


class _File(BaseModel):
    """The JSON file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: str
    count: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    features: list[str]
    sum: list[FiniteFloat]
    products: list[list[FiniteFloat]]
    categories: dict[str, dict[str, Annotated[int, Field(ge=0, le=MOST_ROWS)]]] = {}


def sums_of(
    rows: npt.ArrayLike,
    features: Sequence[str] = (),
    categories: Sequence[str] = (),
    where: str = "the rows",
) -> Sums:
    """The sums of a client's rows.

    Args:
        rows: features in their own units [N, D].
        features: their names; numbers from 0 if there are none.
        categories: names of those that are categories, coded as numbers.
        where: what the rows are of, for errors.

    Raises:
        DataError: there are no rows, a value is missing or infinite, or there is no such feature.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.data.tables.sums import sums_of
        >>> sums_of(np.array([[1.0, 2.0]] * 10), features=["age", "dose"]).total
        array([10., 20.])
    """
    x = np.asarray(rows, np.float64)
    if x.ndim != 2 or not x.size:
        raise DataError(f"{where}: sums need a table [rows, features], got shape {x.shape}")
    names = _names(features, x.shape[1], where)
    odd = ~np.isfinite(x).all(0)
    if odd.any():
        raise DataError(
            f"{where}: {listed(np.array(names)[odd])} has a value that is missing or infinite. "
            "Impute it, or leave such rows out"
        )
    counted = {}
    for name in categories:
        index = _index(name, names, where)
        values, counts = np.unique(x[:, index], return_counts=True)
        if len(values) > MOST_CATEGORIES:
            raise DataError(
                f"{where}: '{name}' has {len(values):,} different values, and at most "
                f"{MOST_CATEGORIES:,} are allowed for a category. Leave it out of categories"
            )
        counted[index] = dict(zip(values.tolist(), counts.tolist(), strict=True))
    with np.errstate(over="ignore"):
        sums = Sums(len(x), x.sum(0), x.T @ x, names, counted)
    if not np.isfinite(sums.products).all():
        raise DataError(f"{where}: values are too large for their squares to be summed; rescale")
    return sums


def add_sums(several: Sequence[Sums], names: Sequence[str] = ()) -> Sums:
    """The sums of all clients' rows.

    Args:
        several: each client's.
        names: of the clients, for errors.

    Raises:
        DataError: there are none, or they are not of the same features and categories.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.inputs import add_sums, sums_of
        >>> one = sums_of(np.array([[1.0]] * 10), features=["age"])
        >>> two = sums_of(np.array([[3.0]] * 10), features=["age"])
        >>> add_sums([one, two]).count
        20
    """
    if not several:
        raise DataError("there are no sums to add")
    called = list(names) or [f"client {index}" for index in range(len(several))]
    first = several[0]
    for name, sums in zip(called, several, strict=True):
        if sums.features != first.features:
            raise DataError(
                f"the sums of {name} have the features {listed(sums.features)}, and those of "
                f"{called[0]} have {listed(first.features)}. All clients need the same features"
            )
        if sums.categories.keys() != first.categories.keys():
            own, other = ({s.features[i] for i in s.categories} for s in (sums, first))
            raise DataError(
                f"'{min(own ^ other)}' is a category at only one of {name} and {called[0]}. Give "
                "the same categories at every client"
            )
    categories: dict[int, dict[float, int]] = {index: {} for index in first.categories}
    for sums in several:
        for index, counts in sums.categories.items():
            for value, count in counts.items():
                categories[index][value] = categories[index].get(value, 0) + count
    return Sums(
        sum(sums.count for sums in several),
        np.sum([sums.total for sums in several], 0),
        np.sum([sums.products for sums in several], 0),
        first.features,
        categories,
    )


def check_sums(several: Sequence[Sums], names: Sequence[str]) -> None:
    """See that no client's sums decide the distribution, or raise a DataError that names it."""
    check_rows({name: sums.count for name, sums in zip(names, several, strict=True)})
    moments = {}
    for name, sums in zip(names, several, strict=True):
        count = np.full(len(sums.features), float(sums.count))
        moments[name] = PlausibleMoments(count, sums.mean, sums.std**2 * sums.count)
    check_moments(moments, several[0].features)


def write_sums(sums: Sums, path: Path) -> None:
    """Write sums as JSON, whole or not at all.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.inputs import sums_of, write_sums
        >>> from pathlib import Path
        >>> write_sums(sums_of(np.array([[1.0]] * 10), features=["age"]), Path("client.json"))
        >>> Path("client.json").exists()
        True
    """
    content = _File(
        format=FORMAT,
        count=sums.count,
        features=list(sums.features),
        sum=sums.total.tolist(),
        products=sums.products.tolist(),
        categories={
            sums.features[index]: {f"{value:.17g}": count for value, count in counts.items()}
            for index, counts in sums.categories.items()
        },
    )
    write_beside(path, json.dumps(content.model_dump()).encode() + b"\n")


def read_sums(path: Path) -> Sums:
    """Read sums that a client sent.

    Raises:
        DataError: there is no such file, it holds no sums, or they can be of no rows.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.inputs import read_sums, sums_of, write_sums
        >>> from pathlib import Path
        >>> write_sums(sums_of(np.array([[1.0]] * 10), features=["age"]), Path("site.json"))
        >>> read_sums(Path("site.json")).count
        10
    """
    file = read_as(_File, path, "does not contain sums")
    if file.format != FORMAT:
        raise DataError(
            f"{path} does not contain sums: its format is {file.format!r}, not {FORMAT!r}"
        )
    width, where = len(file.features), str(path)
    names = _names(file.features, width, where)
    if len(file.sum) != width or [len(row) for row in file.products] != [width] * width:
        raise DataError(
            f"{path}: there are {width} features, and sum needs as many numbers, products as many "
            "rows of as many"
        )
    for name, counts in file.categories.items():
        check_categories(counts, name, where)
    categories = {
        _index(name, names, where): _counted(name, counts, where)
        for name, counts in file.categories.items()
    }
    products = np.array(file.products, np.float64).reshape(width, width)
    sums = Sums(file.count, np.array(file.sum, np.float64), products, names, categories)
    _check(sums, where)
    for index, name in enumerate(names):
        size = math.sqrt(products[index, index] / file.count)
        if not size <= LARGEST:  # nor is NaN
            raise DataError(f"{where}: '{name}' is {size:g}, beyond float32. Rescale the column")
    return sums


def _names(features: Sequence[str], width: int, where: str) -> tuple[str, ...]:
    names = tuple(str(name) for name in features) or tuple(map(str, range(width)))
    if len(names) != width or not width:
        raise DataError(f"{where}: there are {width} features, and {len(names)} names")
    if len(set(names)) < width:
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where}: two features are called '{twice}'")
    return names


def _index(name: str, names: tuple[str, ...], where: str) -> int:
    if name not in names:
        raise DataError(
            f"{where}: there is no feature '{name}'{did_you_mean(name, names)}; there are "
            f"{listed(names)}"
        )
    return names.index(name)


def _counted(name: str, counts: Mapping[str, int], where: str) -> dict[float, int]:
    return {_number(value, name, where): count for value, count in counts.items()}


def _number(value: str, name: str, where: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise DataError(
            f"{where}: categories are numbers, as networks see them, and {quoted(value)} of "
            f"'{name}' is not a number"
        )
    return number


def _check(sums: Sums, where: str) -> None:
    """Reject sums that no rows have."""
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused
        covariance = sums.covariance
        squares = np.diag(sums.products) / sums.count
        scale = np.sqrt(np.maximum(squares, np.finfo(float).tiny))
        products = sums.products / sums.count / np.outer(scale, scale)
    if not np.allclose(products, products.T, rtol=0, atol=ROUNDING):
        raise DataError(f"{where}: products is not symmetric, so it is not a sum of products")
    variance = np.diag(covariance)
    wrong = variance < -ROUNDING * squares
    if (squares < 0).any() or wrong.any():
        name = sums.features[int((wrong | (squares < 0)).argmax())]
        raise DataError(
            f"{where}: these sums give '{name}' a variance below 0, which is impossible. count, "
            "sum and products must come from the same rows"
        )
    centred = covariance / np.outer(scale, scale)
    if np.linalg.eigvalsh((centred + centred.T) / 2).min() < -ROUNDING * len(scale):
        raise DataError(f"{where}: these products are impossible: their covariance is not positive")
    for index, counts in sums.categories.items():
        name, many = sums.features[index], sum(counts.values())
        if many != sums.count:
            raise DataError(
                f"{where}: the categories of '{name}' add to {many:,} rows, and count is "
                f"{sums.count:,}"
            )
        mean = sum(value * n for value, n in counts.items()) / many
        if abs(mean - sums.mean[index]) > ROUNDING * max(scale[index], 1e-12):
            raise DataError(
                f"{where}: by its categories the mean of '{name}' is {mean:g}, by its sum "
                f"{sums.mean[index]:g}"
            )
