"""The `[data]` table of a configuration."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedbayes.errors import did_you_mean
from fedbayes.fields import Arguments, Only, Several
from fedbayes.pretrained import absolute

BUILT_IN = (
    "digits",
    "diabetes",
    "mnist",
    "permuted-mnist",
    "cifar10",
    "cifar100",
    "femnist",
    "har",
    "vehicle",
    "einstein",
)
"""Names of the data sets that the package knows."""

Scheme = Literal["iid", "dirichlet", "dirichlet-equal", "shards", "counts", "natural"]
"""Ways to divide data among clients."""

ANY_SET = frozenset(("name", "dir", "path", "missing", "query", "database"))
"""Settings of how data are read that are not for own data alone."""

_OF_TABLES = ("group", "split", "drop", "features")
"""Settings that a factory does without."""
_SECRETS = re.compile(r"://[^/@]*:[^/@]+@|(pass|pwd|secret|token|key)[^=&]*=", re.IGNORECASE)
"""What in a URL is a password, or may be one."""

KINDS = ("numeric", "categorical", "dates", "text")
"""Settings that name columns of a kind."""

DEFAULT_CLIENTS = 10
"""Number of clients of an artificial partition, unless said otherwise."""


class SourceSettings(BaseModel):
    """Which data, and how they are read: all that decoded data depend on.

    Readers get these settings and no others, and the cache is keyed by all of them.
    """

    # A column may be called 1, which TOML takes for a number.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True
    )

    name: str = Field(
        "digits",
        description=f"Data set: {', '.join(BUILT_IN)}; or own, with path; or "
        "package.module:factory, your own function that gives the clients' data.",
        examples=list(BUILT_IN),
    )
    arguments: Arguments = Field({}, description="Keyword arguments of your own factory.")
    dir: Path | None = Field(
        None,
        description="Folder with one folder per data set; else the environment variable "
        "FEDBAYES_DATA; else the Hugging Face hub.",
    )
    path: Path | None = Field(
        None,
        description="Your own data: a .parquet, .csv, .csv.gz, .xlsx or .npz file, or a folder "
        "with train and test files of one of these kinds, with LEAF JSON files, or with pictures "
        "in a folder for each class (and folders train and test, or of clients, above these).",
    )
    query: str | None = Field(
        None,
        description="Your own data, in place of path: a SQL query whose rows are the table. They "
        "have an order of their own, so that the same rows are the same data.",
    )
    database: Annotated[str | None, Only("query")] = Field(
        None,
        description="URL of the query's database, as SQLAlchemy takes it, without a password: "
        "that is in the environment variable FEDBAYES_DATABASE_PASSWORD, and the whole URL may be "
        "in FEDBAYES_DATABASE. Needs the extra sql.",
    )
    label: Several[str] = Field(
        ("label",),
        min_length=1,
        description="Own tables: the column with the class or the number to be predicted; or "
        "several columns, of numbers, or of 0 and 1 for labels of which any may hold.",
    )
    group: str | None = Field(
        None, description="Own tables: the column with the natural client, left out of x."
    )
    split: str | None = Field(
        None, description="Own tables: a column that says train or test, left out of x."
    )
    classes: Several[str] = Field(
        (), description="Own tables and arrays: names of all classes, where some may not occur."
    )
    drop: Several[str] = Field((), description="Own tables: columns to leave out of x.")
    features: Several[str] = Field(
        (),
        description="Own tables: the columns to take as x, in this order; all others are left "
        "out. Default: all but label, group, split and drop.",
    )
    numeric: Several[str] = Field(
        (),
        description="Own tables: columns that are numbers, also where they are stored as text. "
        "What is no number is an error, whatever else the column might be.",
    )
    categorical: Several[str] = Field(
        (),
        description="Own tables: columns that are categories, also where they are numbers. Each "
        "category becomes a feature, 0 or 1. Default: columns of text with at most "
        "max_categories different values, and two rows for each on average.",
    )
    dates: Several[str] = Field(
        (),
        description="Own tables: columns that are dates, which become days. Default: columns of "
        "dates, and of text written as 2020-03-31, with or without a time.",
    )
    date_format: str | None = Field(
        None,
        description="Own tables: how text in the columns of dates is written, as in %d.%m.%Y. "
        "Default: ISO 8601.",
    )
    text: Several[str] = Field(
        (),
        description="Own tables: columns of free text, whose words are hashed into text_width "
        "numbers. Default: none; free text is refused.",
    )
    text_width: Annotated[int, Only("text")] = Field(
        64, ge=1, le=4096, description="Own tables: numbers that a text is hashed into."
    )
    max_categories: int = Field(
        50,
        ge=1,
        le=1000,
        description="Own tables: different values up to which a column of text is taken for "
        "categories. Columns that categorical names may have 1,000.",
    )
    sheet: str | None = Field(
        None, description="Own tables: the sheet of an Excel file. Default: its only one."
    )
    missing: Literal["default", "indicate", "impute", "drop"] = Field(
        "default",
        description="Missing values of a table: indicate them, by the mean of the clients' "
        "training rows and a feature that says so where these have gaps; impute the mean alone; "
        "or drop such rows. An empty category is one of its own. Default: indicate for own "
        "tables, drop for einstein, impute for others.",
    )
    tokens: str | None = Field(
        None,
        description="Own tables and Hugging Face data sets: the column of texts that becomes x, as "
        "tokens of a pretrained network; all other columns but label, group and split are left "
        "out.",
    )
    max_tokens: Annotated[int, Only("processor")] = Field(
        128, ge=1, description="Tokens of a sample: what is longer is cut, what is shorter padded."
    )
    processor: str | None = Field(
        None,
        description="Pretrained network whose tokenizer makes tokens of texts, or whose image "
        "processor says size, mean and std of pictures: a name on the Hugging Face hub, a folder, "
        "or timm:NAME. Default: that of model.pretrained for your own texts and pictures.",
    )
    size: Several[int] = Field(
        (),
        description="Own pictures: height and width (one number for both) to resize to. Default: "
        "the processor's; without one, all must be of one size.",
    )
    crop: bool = Field(
        False,
        description="Own pictures: whether size is that of the middle, cut out of a picture that "
        "keeps its proportions; if not, the whole is stretched.",
    )
    scale: float | None = Field(
        None,
        gt=0,
        description="Own data: what raw values are divided by before all else, their largest as a "
        "rule. Default: 255 for pictures and integers of 8 bits, 1 for others.",
    )

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
        """All that the decoded data depend on, beside the files, as text."""
        settings = set(SourceSettings.model_fields) - ANY_SET
        how = f"{self.drops_incomplete} {self.tells_missing}"
        return f"{self.model_dump_json(include=settings)} {how}"


class DataSettings(SourceSettings):
    """Which data, and how it is divided among clients."""

    clients: int | None = Field(
        None,
        ge=1,
        description=f"Number of clients. Default: {DEFAULT_CLIENTS}, or every group of a "
        "natural partition, of which a number takes the first ones.",
    )
    partition: Literal["default", Scheme] = Field(
        "default",
        description="iid: equal parts at random. dirichlet: each class is divided by "
        "Dirichlet shares. dirichlet-equal: each client has a Dirichlet class mix and the same "
        "number of samples. shards: each client gets shards of the samples sorted by class. "
        "counts: each client gets so many of each class as class_counts says. "
        "natural: one client per writer, subject or sensor. Default: natural where your own data "
        "name groups, else dirichlet, or iid where the target has no classes.",
    )
    alpha: Annotated[float, Only("partition", "dirichlet", "dirichlet-equal")] = Field(
        0.4, gt=0, allow_inf_nan=False, description="Dirichlet concentration; small is skewed."
    )
    balance: Annotated[bool, Only("partition", "dirichlet")] = Field(
        False,
        description="dirichlet: a client that holds more than the mean number of samples gets "
        "none of the classes still to be divided.",
    )
    shards_per_client: Annotated[int, Only("partition", "shards")] = Field(
        2, ge=1, description="shards: number of shards of a client."
    )
    class_counts: tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="counts: samples of each client and class, as in [[30, 10], [5, 45]]. They "
        "are training samples if test_counts or an official test part is used.",
    )
    test_counts: Several[int] | None = Field(
        None,
        description="counts: test samples of each class, drawn from those that no client trains "
        "on and dealt to the clients in proportion to their training classes.",
    )
    min_samples: int = Field(
        2,
        ge=1,
        description="Smallest number of training samples of a client. Natural groups with "
        "fewer are left out; other partitions are refused.",
    )
    samples_per_client: int | None = Field(
        None, ge=1, description="Largest number of training samples of a client."
    )
    limit: int | None = Field(
        None,
        ge=1,
        description="Use only so many samples, drawn at random, to train on (or to "
        "divide, where the clients split their own).",
    )
    limit_test: int | None = Field(
        None, ge=1, description="Use only so many samples of the official test part."
    )
    test: Literal["default", "official"] | float = Field(
        "default",
        description="official: the official test part is dealt to the clients in proportion to "
        "their training classes. A fraction: each client keeps so much of its own samples for "
        "testing. Default: official where the set has such a part, else 0.25.",
    )

    summaries: Several[Path] = Field(
        (),
        description="Own tables: files of fedbayes data summarize, one of each client. Columns are "
        "encoded by their sums, in place of the training rows here.",
    )

    @field_validator("summaries")
    @classmethod
    def _all_absolute(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser().absolute() for path in paths)
    @field_validator("processor")
    @classmethod
    def _folder(cls, name: str | None) -> str | None:
        """So that a stored config means the same from every folder."""
        return None if name is None else absolute(name)

    @field_validator("size")
    @classmethod
    def _positive(cls, size: tuple[int, ...]) -> tuple[int, ...]:
        if len(size) > 2 or any(side < 1 for side in size):
            raise ValueError("size is one number of pixels, or height and width, each at least 1")
        return size

    @field_validator("dir", "path")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        """So that a stored config means the same from every folder."""
        return None if path is None else path.expanduser().absolute()

    @model_validator(mode="before")
    @classmethod
    def _own_by_path(cls, values: Any) -> Any:
        if isinstance(values, dict) and (values.get("path") or values.get("query")):
            return {"name": "own", **values}
        return values

    @model_validator(mode="after")
    def _agree(self) -> "DataSettings":
        if self.name not in (*BUILT_IN, "own") and not self.of_factory:
            if Path(self.name).suffix or Path(self.name).exists():
                raise ValueError(
                    f"there is no data set '{self.name}'; a file or folder of your own is given as "
                    f"path, and not as name: --set data.path={self.name}"
                )
            like = did_you_mean(self.name, BUILT_IN)
            raise ValueError(
                f"there is no data set '{self.name}'{like}; choose one of {', '.join(BUILT_IN)}, "
                "give the path of your own, or name your own factory as package.module:factory"
            )
        if self.missing == "indicate" and self.name != "own":
            raise ValueError("missing = 'indicate' is for your own tables; choose impute or drop")
        if self.name == "own" and self.path is None and self.query is None:
            raise ValueError("name = 'own' needs the path of your own data; give path too")
        if _SECRETS.search(self.database or ""):  # said without the URL
            raise ValueError(
                "a password in database would end in run folders; leave it out, and set "
                "FEDBAYES_DATABASE_PASSWORD, or the whole URL in FEDBAYES_DATABASE"
            )
        if self.path is not None and self.query is not None:
            raise ValueError("path and query exclude one another; leave one of them out")
        if self.name != "own" and (self.path is not None or self.query is not None):
            given = f"path = {self.path}" if self.query is None else "query"
            raise ValueError(
                f"name = '{self.name}' and {given} do not go together: your own data "
                "has name = 'own', a built-in set needs no path"
            )
        if self.arguments and not self.of_factory:
            raise ValueError(f"arguments are for your own factory; {self.name} takes none")
        if self.crop and not self.size:
            raise ValueError("crop has no effect without size; give both, or neither")
        if self.tokens is not None and self.processor is None:
            raise ValueError(
                "tokens needs a tokenizer: give processor, a name on the Hugging Face hub or a "
                "folder (with model.name = 'transformers' it is that of the model)"
            )
        self._check_columns()
        if isinstance(self.test, float) and not 0 < self.test < 1:
            raise ValueError(f"test = {self.test} must lie between 0 and 1, or be 'official'")
        if (self.partition == "counts") != (self.class_counts is not None):
            raise ValueError("partition = 'counts' and class_counts go together")
        if self.test_counts is not None and self.class_counts is None:
            raise ValueError("test_counts goes with partition = 'counts'")
        if self.class_counts is not None:
            self._check_counts(self.class_counts)
        return self

    def _check_columns(self) -> None:
        if self.summaries and self.name != "own":
            raise ValueError(
                f"summaries is for your own data, and has no effect on {self.name}; leave it "
                "out, or give the path of your own data"
            )
        if self.tokens is not None and (self.features or self.drop):
            raise ValueError("tokens says what x is; leave out features and drop")
        if self.of_factory:
            for setting in _OF_TABLES:
                if getattr(self, setting) != SourceSettings.model_fields[setting].default:
                    raise ValueError(
                        f"{setting} is for tables, and has no effect on what {self.name} gives; "
                        "leave it out"
                    )
        elif self.name != "own":
            for setting, field in SourceSettings.model_fields.items():
                if setting not in ANY_SET and getattr(self, setting) != field.default:
                    raise ValueError(
                        f"{setting} is for your own data, and has no effect on {self.name}; "
                        "leave it out, or give the path of your own data"
                    )
        for setting in ("label", "classes", "features", *KINDS):
            names = getattr(self, setting)
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{setting} names '{twice}' twice; name it once")
        self._check_kinds()
        if self.features and self.drop:
            raise ValueError("features and drop exclude one another: features names all that stays")
        labels = [("label", column) for column in self.label]
        if self.group in self.label:
            raise ValueError(
                f"label and group both name '{self.group}', so each client would have a single "
                "label; set one of them to another column"
            )
        for setting, column in (*labels, ("group", self.group), ("split", self.split)):
            if column in self.features:
                raise ValueError(
                    f"features names '{column}', which is the {setting}; leave it out of features"
                )

    def _check_kinds(self) -> None:
        """See that a column is named as one kind, and as a feature."""
        roles = {**dict.fromkeys(self.label, "label"), **dict.fromkeys(self.drop, "drop")}
        roles |= {name: role for role in ("group", "split") if (name := getattr(self, role))}
        for setting in KINDS:
            for name in getattr(self, setting):
                if name in roles:
                    raise ValueError(
                        f"{setting} and {roles[name]} both name '{name}'; leave it out of one"
                    )
                if self.features and name not in self.features:
                    raise ValueError(f"{setting} names '{name}', which features leaves out; add it")
                roles[name] = setting

    def _check_counts(self, counts: tuple[tuple[int, ...], ...]) -> None:
        rows = [*counts, *([self.test_counts] if self.test_counts is not None else [])]
        if not counts or len({len(row) for row in rows}) > 1:
            raise ValueError("class_counts and test_counts need one number for every class")
        if any(count < 0 for row in rows for count in row):
            raise ValueError("class_counts and test_counts are numbers of samples, 0 or more")
        if self.clients not in (None, len(counts)):
            raise ValueError(f"clients is {self.clients}, class_counts has {len(counts)} rows")
        if self.test_counts is not None and self.test != "default":
            raise ValueError("test_counts and test exclude one another; leave test out")
