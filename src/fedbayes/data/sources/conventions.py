"""How a CSV file is written: its encoding and delimiter, its header, and its decimals."""

import codecs
import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedbayes.core.categories import normal
from fedbayes.core.wording import listed
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.unpacking import AT_LEAST, BoundedGzip, as_text
from fedbayes.errors import DataError, UnclearError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
WORDS = {".": "points", ",": "commas"}
"""What separates decimals, in words."""
_HEAD = 1 << 16
_PIECE = 1 << 20
_FALLBACK = "cp1252"
"""The encoding of Western European files that are no UTF-8."""
_OTHER_GROUPS = " '\u2019\u00a0\u202f"
"""What separates thousands, besides the point or comma that does not separate decimals."""
_OTHER = {".": ",", ",": "."}


@dataclass(frozen=True)
class Layout:
    """How the lines of a CSV file are read."""

    encoding: str
    delimiter: str
    names: tuple[str, ...]
    """Of the columns, without blanks around them; empty where the header has none."""
    header: int
    """Rows of the header."""
    notes: tuple[str, ...] = ()
    """What a user should know."""

    @property
    def columns(self) -> list[str]:
        """A name for each column, as pandas has it where the header has none."""
        return [name or f"Unnamed: {place}" for place, name in enumerate(self.names)]


def layout(file: Path, settings: SourceSettings) -> Layout:
    """The encoding and delimiter of a CSV file, and the names in its header.

    The delimiter is comma, semicolon, tab or bar (tab first in a .tsv file). It is the first one
    that splits all rows at the beginning into as many fields as the last row of the header, and
    into more than one. Without such a delimiter, it is a comma, or a tab in a .tsv file.

    Args:
        file: The file.
        settings: Its encoding, where it is not UTF-8, and the rows of its header.

    Raises:
        DataError: It cannot be decoded, or its header has more rows than the file, or numbers.
    """
    encoding, notes = _encoding(file, settings.encoding)
    with _opened(file, encoding) as stream:
        lines = [stream.readline(AT_LEAST) for _ in range(settings.header_rows)]
        rest = stream.read(_HEAD)
    whole, head = len(rest) < _HEAD, "".join(lines) + rest
    tabs = file.name.lower().removesuffix(".gz").endswith(".tsv")
    choice = sorted(DELIMITERS, key=lambda delimiter: delimiter != "\t") if tabs else DELIMITERS
    rows: dict[str, list[list[str]]] = {}
    for delimiter in choice:
        found = [row for row in csv.reader(StringIO(head, newline=""), delimiter=delimiter) if row]
        # The last row may be cut off.
        rows[delimiter] = found if whole or len(found) < 2 else found[:-1]
    count = settings.header_rows
    usual = "\t" if tabs else ","
    chosen = usual
    for delimiter, found in rows.items():
        widths = {len(row) for row in found[count - 1 :]}
        if len(widths) == 1 and max(widths) > 1:
            chosen = delimiter
            break
    header = [[normal(cell).strip() for cell in row] for row in rows[chosen][:count]]
    if len(header) < count and count > 1:
        raise DataError(
            f"{file} has {len(header)} rows, and data.header_rows is {count}. Set a smaller number"
        )
    names = tuple(header[0]) if header else ()
    if count > 1:
        names = header_names(file, header)
        notes.append(called(file, names, count))
    if chosen != usual:
        notes.append(f"{file} is read with {DELIMITERS[chosen]} between columns")
    return Layout(encoding, chosen, names, count, tuple(notes))


def called(file: Path, names: Sequence[str], count: int) -> str:
    """What to say of the names of columns that have several header rows."""
    return f"{file} has {count} header rows; its columns are {listed(names, 8)}"


def header_names(file: Path, header: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Names of columns by several header rows.

    A name is the cell of the first row. Where that is empty, or in another column too, as with
    merged cells, a name has the cells of all rows. A row of one cell is a title, and no name.

    Raises:
        DataError: A row after the first holds mostly numbers, and so is of data.
    """
    width = max(map(len, header))
    rows = [[*row, *[""] * (width - len(row))] for row in header]
    for row in header[1:]:
        cells = [cell for cell in row if cell]
        numbers = [cell for cell in cells if re.fullmatch(_pattern(".", ","), cell)]
        if 2 * len(numbers) > len(cells):
            raise DataError(
                f"{file}: row {header.index(row) + 1} of the header contains numbers "
                f"({listed(numbers, 3)}). Set data.header_rows to the number of rows above the "
                "data"
            )
    rows = [row for row in rows if width == 1 or sum(map(bool, row)) > 1] or rows
    *above, last = rows
    merged = any(below and not cell for cell, below in zip(rows[0], last, strict=True))
    names = [next(filter(None, cells), "") for cells in zip(*rows, strict=True)]
    if not merged and len(set(names)) == len(names):
        return tuple(names)
    filled: list[list[str]] = []
    for row in above:
        left = ""
        filled.append([left := cell or left for cell in row])
    together = zip(*filled, last, strict=True)
    return tuple(" ".join(dict.fromkeys(filter(None, cells))) for cells in together)


@contextmanager
def _binary(file: Path) -> Iterator[IO[bytes]]:
    with file.open("rb") as opened:
        yield BoundedGzip(file, opened) if file.suffix.lower() == ".gz" else opened  # type: ignore[misc]


@contextmanager
def _opened(file: Path, encoding: str) -> Iterator[IO[str]]:
    with file.open("rb") as opened, as_text(file, opened, encoding) as text:
        yield text


def _encoding(file: Path, asked: str | None) -> tuple[str, list[str]]:
    """The encoding of a file: UTF-8 if all of it is that, else the one that was asked for."""
    with _binary(file) as stream:
        start = stream.read(4)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16", [f"{file} is read as UTF-16"]
    wide = asked is not None and codecs.lookup(asked).name.startswith(("utf-16", "utf-32"))
    if not wide and _odd_byte(file, "utf-8") is None:
        return "utf-8-sig", []
    encoding = asked or _FALLBACK
    odd = _odd_byte(file, encoding)
    if odd is not None:
        what = f"not text in {asked}" if asked else "neither UTF-8 nor Western European text"
        raise DataError(
            f"{file} is {what}: byte {odd:,} is invalid. Set data.encoding to its encoding, such "
            "as cp1250 or utf-16-le, or save it as UTF-8"
        )
    if asked is not None:
        return encoding, [f"{file} is read as {asked}"]
    return encoding, [
        f"{file} is not UTF-8, so it is read as {_FALLBACK} (Western "
        f"European){_shown(file, encoding)}. Set data.encoding for another encoding"
    ]


def _odd_byte(file: Path, encoding: str) -> int | None:
    """The first byte that cannot be decoded; None if there is none."""
    decoder, done = codecs.getincrementaldecoder(encoding)(), 0
    with _binary(file) as stream:
        while True:
            piece = stream.read(_PIECE)
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                return done + error.start
            done += len(piece)
            if not piece:
                return None


def _shown(file: Path, encoding: str) -> str:
    """A word that shows whether an encoding is the right one."""
    with _opened(file, encoding) as stream:
        for line in stream:
            if found := re.search(r"\w*[^\x00-\x7f]\w*", line):
                return f", as in '{found[0][:40]}'"
    return ""


def _pattern(decimal: str, groups: str) -> str:
    """A regular expression of numbers: plain, or in groups of three digits."""
    point = re.escape(decimal)
    plain = rf"(?:\d+(?:{point}\d*)?|{point}\d+)(?:[eE][+-]?\d+)?"
    if not groups:
        return f"[+-]?{plain}"
    group = f"[{re.escape(groups)}]"
    grouped = rf"[1-9]\d{{0,2}}(?P<group>{group})\d{{3}}(?:(?P=group)\d{{3}})*(?:{point}\d*)?"
    return f"[+-]?(?:{plain}|{grouped})"


@dataclass
class Numbers:
    """How numbers of a file may be written: what separates decimals, and thousands."""

    decimal: str | None
    """Point or comma, where it was asked for."""
    thousands: str | None
    """What separates thousands, where it was asked for; empty: nothing does."""
    fits: dict[str, re.Pattern[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.fits = {one: re.compile(_pattern(one, self.groups(one))) for one in WORDS}

    @classmethod
    def of(cls, settings: SourceSettings) -> "Numbers":
        """By the settings of a source."""
        thousands = {"auto": None, "none": ""}.get(settings.thousands, settings.thousands)
        return cls(None if settings.decimal == "auto" else settings.decimal, thousands)

    def groups(self, decimal: str) -> str:
        """What may separate thousands next to decimals."""
        if self.thousands is None:
            return _OTHER[decimal] + _OTHER_GROUPS
        return "" if self.thousands == decimal else self.thousands

    def look(self, texts: Iterable[str]) -> "ConventionEvidence":
        """What the different cells of a column say."""
        found = ConventionEvidence(dict.fromkeys(WORDS, True))
        for text in map(str.strip, texts):
            for one, pattern in self.fits.items():
                if found.fits[one] and not pattern.fullmatch(text):
                    found.fits[one] = False
            if not any(found.fits.values()):
                return found
            if "." in text or "," in text:
                found.example = found.example or text
                found.points |= "." in text
            elif text.lstrip("+-").isdigit():
                found.whole = found.whole or text
        return found

    def read(self, column: Any, decimal: str, *, grouped: bool = True) -> tuple[Any, str]:
        """A column of texts with numbers as Python writes them, and a text that had groups.

        Args:
            column: Texts; what is no number stays as it is.
            decimal: What separates decimals.
            grouped: Whether thousands may be in groups.
        """
        groups = self.groups(decimal) if grouped else ""
        pattern = self.fits[decimal] if grouped else re.compile(_pattern(decimal, ""))
        drop, found, example = str.maketrans("", "", groups), {}, ""
        for text in column.dropna().unique():
            bare = text.strip()
            if pattern.fullmatch(bare):
                joined = bare.translate(drop)
                example = example or (bare if joined != bare else "")
                bare = joined.replace(decimal, ".")
            found[text] = bare
        return column.map(found, na_action="ignore"), example


@dataclass
class ConventionEvidence:
    """What the cells of a column say of how its numbers are written."""

    fits: dict[str, bool]
    """Whether all are numbers if point, or comma, separates decimals."""
    example: str = ""
    """A cell with a point or comma."""
    whole: str = ""
    """A cell of digits alone."""
    points: bool = False
    """Whether a cell has a point."""

    def join(self, later: "ConventionEvidence") -> "ConventionEvidence":
        """What this and later cells of the column say together."""
        return ConventionEvidence(
            {one: self.fits[one] and later.fits[one] for one in WORDS},
            self.example or later.example,
            self.whole or later.whole,
            self.points or later.points,
        )

    @property
    def certain(self) -> str:
        """What must separate decimals; empty if nothing says so."""
        sure = [one for one in WORDS if self.fits[one] and not self.fits[_OTHER[one]]]
        return sure[0] if sure else ""

    @property
    def unclear(self) -> bool:
        """Whether cells are other numbers with decimal points than with commas."""
        return all(self.fits.values()) and bool(self.example)


@dataclass(frozen=True)
class ConventionDecision:
    """How the numbers of a file are read."""

    file: str = ""
    """What separates its decimals; empty where nothing says so."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The same of each column that holds numbers."""

    def of(self, column: str) -> str:
        """What separates the decimals of a column."""
        return self.columns.get(column, self.file or ".")


def decide(
    evidence: Mapping[str, ConventionEvidence],
    numbers: Numbers,
    delimiter: str,
    where: str,
    *,
    hint: str = "",
    free: Iterable[str] = (),
) -> ConventionDecision:
    """How the numbers of a file are read, by what all its columns say.

    A column is read by what its own cells say. Where they say nothing, as in 1.581, those of the
    other columns decide.

    Args:
        evidence: By column.
        numbers: What was asked for.
        delimiter: Between columns. Where it is a comma, decimals are after a point, unless the
            cells of a column look like groups of three digits.
        where: The file, for messages.
        hint: What separates decimals where no cell says so: as the training's file was written.
        free: Columns that may be read in either way, since they are no numbers for sure.

    Raises:
        UnclearError: A column can be read in two ways.
        DataError: A column is written otherwise than was asked for.
    """
    free, certain = set(free), {name: one.certain for name, one in evidence.items()}
    if numbers.decimal is not None:
        for name, own in certain.items():
            if own and own != numbers.decimal and name not in free:
                raise DataError(
                    f"{where}: column '{name}' has decimal {WORDS[own]} "
                    f"({evidence[name].example!r}), and data.decimal is {numbers.decimal!r}. Set "
                    f"data.decimal to {own!r} or 'auto', or list the column in data.categorical"
                )
        return ConventionDecision(numbers.decimal, dict.fromkeys(evidence, numbers.decimal))
    sure = set(filter(None, certain.values()))
    file = sure.pop() if len(sure) == 1 else ""
    mixed = len(sure) > 1
    file = file or ("" if mixed else hint)
    columns = {}
    for name, one in evidence.items():
        own = certain[name] or file
        if not own and one.unclear and name not in free:
            if delimiter == "," and one.points and not (one.whole or mixed):
                own = "."
            else:
                raise _unclear(name, one, numbers, where)
        columns[name] = own or "."
    return ConventionDecision(file, columns)


def _unclear(name: str, one: ConventionEvidence, numbers: Numbers, where: str) -> UnclearError:
    value, shown = one.example, {}
    for decimal in WORDS:
        drop = str.maketrans("", "", numbers.groups(decimal))
        shown[decimal] = float(value.translate(drop).replace(decimal, "."))
    return UnclearError(
        f"{where}: column '{name}' can be read in two ways: {value!r} is {shown['.']:g} with "
        f"decimal points, and {shown[',']:g} with decimal commas. Set data.decimal to '.' or ','; "
        "or list the column in data.categorical, data.text or data.drop"
    )


def may_be_grouped(column: Any) -> bool:
    """Whether numbers that were read with decimal points may be whole ones in groups of three
    digits: 1.581, but not 0.581, 1.5812 or 1581.5.
    """
    values = np.abs(np.asarray(column.to_numpy(np.float64, na_value=np.nan)))
    values = values[np.isfinite(values)]
    thousands = values * 1000
    grouped = (values >= 1) & (values < 1000) & (np.abs(thousands - np.rint(thousands)) < 1e-6)
    return bool((grouped | (values == np.rint(values))).all())
