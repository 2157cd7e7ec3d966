"""Whether samples are of one kind: in the shape and scale of a sample, its features, its target."""

from typing import NamedTuple, Protocol

from fedbayes.core.targets import Target
from fedbayes.core.wording import listed, size
from fedbayes.data.tables.columns import Column, described
from fedbayes.data.tokens import Tokens


class Described(Protocol):
    """A description of samples: a data set, or a model's preprocessing."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""

    @property
    def scale(self) -> float:
        """The number by which raw samples are divided first."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features of a table; empty if they have none."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of a table, if it is encoded."""

    @property
    def target(self) -> Target:
        """The target."""

    @property
    def tokens(self) -> Tokens | None:
        """How texts become samples; None if they do not."""


class Difference(NamedTuple):
    """A difference of two kinds of samples, as text of a message."""

    what: str
    """SHAPE, SCALE, FEATURES, TOKENS, CLASSES or TARGETS."""
    first: str
    """How it is of the first."""
    second: str
    """How it is of the second."""


SHAPE = "samples of shape"
SCALE = "samples that are divided by"
FEATURES = "features"
CLASSES = "classes"
TARGETS = "targets"
TOKENS = "tokens of"


def differences(
    first: Described, second: Described, *, may_lack_names: bool = False
) -> list[Difference]:
    """The differences of the second kind of samples from the first; empty if there are none.

    Center and scale of a real target do not count: they are of certain rows.

    Args:
        first: what is wanted.
        second: what there is.
        may_lack_names: whether features without names count as those that are wanted.
    """
    found: list[Difference] = []
    tables = [one.columns or tuple(map(Column, one.features)) for one in (first, second)]
    if all(tables) and (first.columns or second.columns):
        # Rows of tables are encoded as is wanted, whatever categories and gaps they have.
        found += _of_columns(*tables)
    else:
        if first.shape != second.shape:
            found.append(Difference(SHAPE, size(first.shape), size(second.shape)))
        named = second.features or not may_lack_names
        if named and first.features != second.features:
            found.append(Difference(FEATURES, _names(first.features), _names(second.features)))
    if first.scale != second.scale:
        found.append(Difference(SCALE, f"{first.scale:g}", f"{second.scale:g}"))
    if first.tokens != second.tokens:
        found.append(Difference(TOKENS, _tokens(first.tokens), _tokens(second.tokens)))
    old, new = first.target, second.target
    if (old.kind, old.names) != (new.kind, new.names):
        if old.classes and new.classes:
            found.append(Difference(CLASSES, listed(old.names), listed(new.names)))
        else:
            found.append(Difference(TARGETS, _target(old), _target(new)))
    return found


def _of_columns(first: tuple[Column, ...], second: tuple[Column, ...]) -> list[Difference]:
    kinds = [
        [(one.name, one.kind.replace("boolean", "number"), one.width) for one in columns]
        for columns in (first, second)
    ]
    if kinds[0] == kinds[1]:
        return []
    return [Difference(FEATURES, described(first), described(second))]


def _names(features: tuple[str, ...]) -> str:
    return listed(features) or "without names"


def _tokens(tokens: Tokens | None) -> str:
    if tokens is None:
        return "no tokenizer"
    return f"the tokenizer {tokens.tokenizer} ({tokens.digest[:12]}…), {tokens.length} of a text"


def _target(target: Target) -> str:
    return f"{target.kind}: {listed(target.names)}"
