"""Which data, and how they are read: the settings of `[data]` that readers get."""

import codecs
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedbayes.core.brief import Settings
from fedbayes.core.categories import normal
from fedbayes.core.fields import AbsolutePath, Arguments, Only, Several
from fedbayes.core.pretrained import PretrainedName

TEXTS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
"""Suffixes of tables that are text."""
TABLES = (".parquet", *TEXTS, ".xlsx")
"""Suffixes of tables."""
CLIENT = "(file)"
"""The column of the clients that files are named after, in a table of all rows."""
BUILT_IN = (
    "digits",
    "diabetes",
    "mnist",
    "permuted-mnist",
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "femnist",
    "har",
    "vehicle",
    "einstein",
)
"""Names of the data sets that the package knows."""

ANY_SET = frozenset(("name", "dir", "path", "missing", "query", "database"))
"""Settings of how data are read that are not for own data alone."""

_SECRETS = re.compile(
    r"://[^/@]*:[^/@]+@|[?&;][^=&;]*(pass|pwd|secret|token|key)[^=&;]*=", re.IGNORECASE
)

WRITTEN = ("decimal", "thousands", "encoding", "header_rows", "na_values")
"""Settings that say how tables are written."""
KINDS = ("numeric", "categorical", "dates", "text")
"""Settings that name columns of a kind."""


def holds_password(url: str | None) -> bool:
    """Whether there is a password in the URL of a database, or what may be one."""
    return _SECRETS.search(url or "") is not None


def is_data(path: Path) -> bool:
    """Whether a path is one of data, and not of a config, by its name; folders are."""
    return path.name.lower().endswith((*TABLES, ".npz", ".json")) or path.is_dir()


class SourceSettings(Settings):
    """Which data, and how they are read: all that decoded data depend on.

    Readers get these settings and no others, and the cache is keyed by all of them.
    """

    # A column may be called 1, which TOML takes for a number.
    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: str = Field(
        "digits",
        description=f"Data set: {', '.join(BUILT_IN)}; or own, with data.path; or "
        "package.module:factory, your own function that returns the clients' data.",
        examples=list(BUILT_IN),
    )
    arguments: Arguments = Field({}, description="Keyword arguments for your own factory.")
    dir: AbsolutePath | None = Field(
        None,
        description="Folder with one folder per data set. Unset: the environment variable "
        "FEDBAYES_DATA, else the Hugging Face hub.",
    )
    path: AbsolutePath | None = Field(
        None,
        description="Your own data: a .parquet, .csv, .tsv, .xlsx or .npz file (.csv and .tsv "
        "also as .gz). Or a folder: with train and test files of these kinds, with LEAF JSON "
        "files, or with images in one folder per class. The class folders can be inside "
        "train and test, or inside one folder per client.",
    )
    more: Annotated[Several[AbsolutePath], Only("path")] = Field(
        (),
        description="Own tables: the files of more clients, in addition to path. Each file is then "
        "one client, named after it. Columns are matched by name.",
    )
    query: str | None = Field(
        None,
        description="Your own data, instead of path: a SQL query that returns the table. The "
        "rows are sorted, so their order in the database has no effect.",
    )
    database: Annotated[str | None, Only("query")] = Field(
        None,
        description="SQLAlchemy URL of the query's database, without a password. Set the password "
        "in the environment variable FEDBAYES_DATABASE_PASSWORD, or the whole URL in "
        "FEDBAYES_DATABASE. Needs the extra sql.",
    )
    label: Several[str] = Field(
        ("label",),
        min_length=1,
        description="Own tables: the column with the class or number to predict. Or several "
        "columns: of numbers, or of 0 and 1 for labels that do not exclude each other.",
    )
    group: str | None = Field(
        None, description="Own tables: the column with the client of each row. It is not a feature."
    )
    split: str | None = Field(
        None, description="Own tables: a column with train or test. It is not a feature."
    )
    classes: Several[str] = Field(
        (), description="Own tables and arrays: names of all classes, if some may be absent."
    )
    drop: Several[str] = Field((), description="Own tables: columns that are not features.")
    features: Several[str] = Field(
        (),
        description="Own tables: the columns to use as features, in this order. Default: all but "
        "label, group, split and drop.",
    )
    numeric: Several[str] = Field(
        (),
        description="Own tables: columns that are numbers, even if stored as text. A value that "
        "is not a number raises an error.",
    )
    categorical: Several[str] = Field(
        (),
        description="Own tables: columns that are categories, even if they have numbers. Each "
        "category becomes a feature, 0 or 1. Default: text columns with at most max_categories "
        "values and on average two rows for each value.",
    )
    dates: Several[str] = Field(
        (),
        description="Own tables: columns of dates, which become numbers of days. Default: date "
        "columns, and text written as 2020-03-31, with or without a time.",
    )
    date_format: Annotated[str | None, Only("dates")] = Field(
        None,
        description="Own tables: format of text dates in the columns of dates, as in %d.%m.%Y. ISO "
        "8601 dates are always read. Default: ISO 8601 only.",
    )
    text: Several[str] = Field(
        (),
        description="Own tables: columns of free text; their words are hashed into text_width "
        "numbers. Default: none, and free text raises an error.",
    )
    text_width: Annotated[int, Only("text")] = Field(
        64, ge=1, le=4096, description="Own tables: number of features that a text is hashed into."
    )
    max_categories: int = Field(
        50,
        ge=1,
        le=1000,
        description="Own tables: largest number of values of a text column that is read as "
        "categories. Columns listed in categorical may have 1,000.",
    )
    decimal: Literal["auto", ".", ","] = Field(
        "auto",
        description="Own CSV files: the decimal separator. auto: it is inferred for each file; a "
        "column that can be read in two ways raises an error.",
    )
    thousands: Literal["auto", "none", ".", ",", " ", "'"] = Field(
        "auto",
        description="Own CSV files: the thousands separator, as in 1.234,56. auto: a comma, point, "
        "blank or apostrophe, if all cells of a column allow it. none: no separator.",
    )
    encoding: str | None = Field(
        None,
        description="Own CSV files: the encoding of files that are not UTF-8, such as cp1252 or "
        "utf-16-le. Default: cp1252, with a note.",
    )
    header_rows: int = Field(
        1,
        ge=1,
        le=100,
        description="Own CSV and Excel files: number of header rows. The first one names the "
        "columns; under merged cells all of them do.",
    )
    na_values: Several[str] = Field(
        (),
        description="Own tables: texts that mean a missing value, in addition to an empty cell, "
        "such as -999, unknown and ?.",
    )
    sheet: str | None = Field(
        None, description="Own tables: the sheet of an Excel file. Default: its only one."
    )
    missing: Literal["default", "indicate", "impute", "drop"] = Field(
        "default",
        description="Missing values of a table. impute: replace them by the mean of the clients' "
        "training rows. indicate: the same, and add a feature that marks them. drop: leave out "
        "such rows. An empty category is a category of its own. Default: indicate for own tables, "
        "drop for einstein, impute for others.",
    )
    tokens: str | None = Field(
        None,
        description="Own tables and Hugging Face data sets: the text column that becomes tokens of "
        "a pretrained network. Other columns except label, group and split are left out.",
    )
    max_tokens: Annotated[int, Only("processor")] = Field(
        128,
        ge=1,
        description="Number of tokens of a sample: longer texts are cut, shorter ones padded.",
    )
    processor: PretrainedName | None = Field(
        None,
        description="Pretrained network that provides the tokenizer of texts, or size, mean and "
        "std of images: a name on the Hugging Face hub, a folder, or timm:NAME. Default: "
        "model.pretrained for your own texts and images.",
    )
    size: Several[int] = Field(
        (),
        description="Own pictures: height and width (one number for both) to resize to. Default: "
        "the processor's; without one, all pictures need the same size.",
    )
    crop: bool = Field(
        False,
        description="Own pictures: whether to crop the middle to size and keep the proportions. If "
        "false, the whole picture is stretched.",
    )
    channels: Literal["auto", "first", "last", "absent"] = Field(
        "auto",
        description="Own arrays: where the channels of an image are. auto: [n, H, W] with sides "
        "of about the same length gets a channel, and a last axis of 1, 3 or 4 moves to the "
        "front, with a note. first: samples stay unchanged, as for signals. absent: they get "
        "a channel.",
    )
    scale: float | None = Field(
        None,
        gt=0,
        description="Own data: raw values are divided by this number first. Usually their "
        "largest value. Default: 255 for pictures and integers of 8 bits, 1 for others.",
    )

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, name: str | None) -> str | None:
        try:
            codecs.lookup(name or "utf-8")
        except LookupError:
            raise ValueError(
                f"unknown encoding {name!r}. Choose one such as cp1252, latin-1 or utf-16"
            ) from None
        return name

    @field_validator("label", "group", "split", "classes", "drop", "features", *KINDS, "tokens")
    @classmethod
    def _normal(cls, given: Any) -> Any:
        """Names in Unicode's form NFC, as those of tables."""
        if isinstance(given, tuple):
            return tuple(normal(name) for name in given)
        return None if given is None else normal(given)

    @model_validator(mode="after")
    def _separate(self) -> Self:
        if self.decimal == self.thousands != "auto":
            raise ValueError(
                f"decimal and thousands are both {self.decimal!r}. Leave one of them out"
            )
        return self

    @property
    def of_table(self) -> Self:
        """The same for the table of all rows, which has a column of the clients' files."""
        return self.model_copy(update={"group": CLIENT}) if self.more else self

    @property
    def of_factory(self) -> bool:
        """Whether a function of the user's own gives the data."""
        return ":" in self.name

    @property
    def drops_incomplete(self) -> bool:
        """Whether rows with missing values are left out."""
        return self.missing == "drop" or (self.missing == "default" and self.name == "einstein")

    @property
    def tells_missing(self) -> bool:
        """Whether missing values have a feature of their own."""
        return self.missing == "indicate" or (self.missing == "default" and self.name == "own")

    @property
    def reading(self) -> str:
        """All that the decoded data depend on, in addition to the files, as text."""
        settings = set(SourceSettings.model_fields) - ANY_SET
        how = f"{self.drops_incomplete} {self.tells_missing}"
        return f"{self.model_dump_json(include=settings)} {how}"
