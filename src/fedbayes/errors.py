"""The errors that a user can cause and fix.

Every one carries a message that names the thing at fault and the way out. The command line
prints the message alone; a traceback is for our own mistakes.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec


class FedbayesError(Exception):
    """Base of all errors that are the input's fault and not the program's.

    Examples:
        >>> import fedbayes
        >>> from fedbayes.errors import FedbayesError
        >>> try:
        ...     fedbayes.Config.create(rounds=0)
        ... except FedbayesError as error:
        ...     print(error)
        rounds is 0; expected integer >= 1
    """


class FedbayesWarning(UserWarning):
    """What a user should know of a result that is given all the same.

    Raised by `warn`, so Python's filters turn it off or into an error; the command line prints it
    as a note, and goes on.
    """


def warn(text: str) -> None:
    """Print a warning; it is of the line outside of this package that led to it."""
    level, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("fedbayes."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, FedbayesWarning, stacklevel=level + 1)


class ConfigError(FedbayesError):
    """A setting is unknown, of the wrong type, or out of range."""


class DataError(FedbayesError):
    """A data set is absent, unreadable, or cannot be divided as asked."""


class ColumnError(DataError):
    """A table has no column of a name.

    Args:
        text: the message.
        column: the name.
        setting: which setting named it.
        like: what to add to a message of one's own, if a column of the table is like it.
    """

    def __init__(self, text: str, column: str = "", setting: str = "", like: str = "") -> None:
        super().__init__(text)
        self.column, self.setting, self.like = column, setting, like


class CellError(DataError):
    """A cell of a table does not match the type of its column.

    Args:
        text: the message.
        column: name of the column.
        row: the first such row, from 0.
    """

    def __init__(self, text: str, column: str = "", row: int = 0) -> None:
        super().__init__(text)
        self.column, self.row = column, row


class UnclearError(DataError):
    """A file can be read in two ways; the message names the setting that chooses one."""


class ModelError(FedbayesError):
    """A network cannot be built, or does not fit the data or the weights."""


class NetworkError(ModelError, RuntimeError):
    """A network's own code raised an error, or its outputs do not fit its inputs.

    It is a RuntimeError too, as PyTorch's errors are: whoever tries a network out catches those.
    """


class MessageError(FedbayesError):
    """Bytes are not a message, or not the expected message."""


class EngineError(FedbayesError):
    """An engine could not carry out a client's work."""


class RunError(FedbayesError):
    """A run folder is absent, damaged, or cannot be continued."""


@contextmanager
def told_as(
    error: type[FedbayesError], before: str, *kinds: type[Exception], after: str = ""
) -> Iterator[None]:
    """Raise an error of ours, with words around the reason, in the place of those of some kinds."""
    try:
        yield
    except kinds as found:
        raise error(f"{before}: {_reason(found)}{after}") from None


def _reason(found: Exception) -> object:
    """What an error says: one of the system without its number, one of Pydantic the first place."""
    if callable(every := getattr(found, "errors", None)):
        first = every()[0]
        place, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        return f"{place}: {said}" if place else said
    return getattr(found, "strerror", None) or found


def quoted(word: str) -> str:
    """The printable start of an untrusted word in quotes, for an error."""
    return repr(word if len(word) <= 60 else f"{word[:59]}…")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What to add to a message on an unknown word: the known one that is like it, if any is."""
    known = list(known)
    same = [name for name in known if name.casefold() == word.casefold()]
    close = same or get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def not_among(what: str, word: str, known: Iterable[str], more: str = "") -> str:
    """The message on an unknown word: the known one that is like it, and all that there are, or
    the command that lists these where they are many.
    """
    known = list(known)
    many = f"one of {len(known)} that `fedbayes {what}s` lists"
    choices = ", or ".join(filter(None, (many if len(known) > 30 else ", ".join(known), more)))
    return f"unknown {what} {word!r}{did_you_mean(word, known)}. Choose {choices}"


def require_extra(extra: str, what: str, error: type[FedbayesError], *packages: str) -> None:
    """See that packages of an extra are installed, which something needs."""
    for package in packages:
        if find_spec(package) is None:
            name = package.replace("_", "-")
            raise error(f"{what} needs {name}: pip install 'fedbayes[{extra}]'")


_CONTROLS = {
    **dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd"),
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"),
}
"""What steers a terminal, or turns the direction of writing, but for line ends and tabs."""


def plain(text: str) -> str:
    """Text without terminal control sequences, which names and contents of files may have."""
    return text.translate(_CONTROLS)
