"""What a task predicts, as the data have it."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from fedbayes.errors import DataError

Kind = Literal["class", "labels", "real", "count", "survival"]
"""One of several classes; any of several labels; real numbers; counts 0, 1, 2, …; a time, and
whether it is of an event or the last that is known."""


@dataclass(frozen=True)
class Target:
    """The target of predictions, with its kind and names.

    The kind decides the targets of n samples, `Samples.y`:

    - `class`: int64 [n], indices of classes.
    - `labels`: float32 [n, labels], 0 or 1.
    - `real`, `count`: float32 [n, columns], in their own unit.
    - `survival`: float32 [n, 2], a time, and 1 for an event or 0 for censored.

    Raises:
        DataError: the kind is unknown, names repeat, or center and scale do not fit the names.

    Examples:
        >>> from fedbayes.core.targets import Target
        >>> Target("class", ("no", "yes")).classes
        2
    """

    kind: Kind
    """What sort of thing it is."""
    names: tuple[str, ...]
    """Of the classes (class), of the labels (labels), of the target columns (real, count), of
    those of time and event (survival)."""
    center: tuple[float, ...] = ()
    """Real: mean of each target column over the training rows, in its own unit. Count: likewise,
    above 0, where it is known."""
    scale: tuple[float, ...] = ()
    """Real: standard deviation of each target column over the training rows, above 0."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise DataError(f"a target is {', '.join(get_args(Kind))}, not {self.kind!r}")
        if not self.names:
            raise DataError(f"a {self.kind} target needs at least one name")
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DataError(f"{twice!r} is the name of two parts of a {self.kind} target")
        if self.kind == "survival" and len(self.names) != 2:
            raise DataError(
                f"a survival target has two columns, time and event, not {len(self.names)}"
            )
        for word, values in (("center", self.center), ("scale", self.scale)):
            if values and len(values) != len(self.names):
                raise DataError(
                    f"a target has {len(self.names)} columns, and {len(values)} of {word}"
                )
            positive = word == "scale" or self.kind == "count"
            for name, value in zip(self.names, values, strict=False):
                if not isfinite(value) or (positive and value <= 0):
                    wanted = "a number above 0" if positive else "a finite number"
                    raise DataError(f"the {word} of target {name!r} is {value}, not {wanted}")

    @property
    def classes(self) -> int:
        """Number of classes; 0 if there are none."""
        return len(self.names) if self.kind == "class" else 0

    @property
    def columns(self) -> int:
        """Entries of a target of one sample: 1 for a class, else one for each name."""
        return 1 if self.kind == "class" else len(self.names)

    @property
    def predicted(self) -> int:
        """Numbers that are predicted of a sample: one for each name; of survival the risk."""
        return 1 if self.kind == "survival" else len(self.names)
