"""The `[data]` table of a configuration."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedbayes.core.fields import AbsolutePath, Only, Place, Several
from fedbayes.core.lazy import installed
from fedbayes.data.source_settings import (
    ANY_SET,
    BUILT_IN,
    KINDS,
    WRITTEN,
    SourceSettings,
    holds_password,
)
from fedbayes.errors import did_you_mean

Scheme = Literal["iid", "dirichlet", "dirichlet-equal", "shards", "counts", "natural"]
"""Ways to divide data among clients."""

PARTITION = "function(y, clients, rng)"
"""How a user's own partition is called."""

_OF_TABLES = ("group", "split", "drop", "features", *WRITTEN)
"""Settings that a factory does without."""

GENERATOR = "generator"
"""The name of data that a generator gives."""
_OF_GENERATOR = frozenset(
    (
        *("name", "generator", "arguments", "clients", "test", "test_clients", "cache"),
        *("min_samples", "classes", "label", "scale", "channels", "standardize"),
    )
)
"""Settings that have an effect on what a generator gives."""

DEFAULT_CLIENTS = 10
"""Number of clients of an artificial partition, unless said otherwise."""


class DataSettings(SourceSettings):
    """Which data, and how it is divided among clients.

    Examples:
        >>> from fedbayes.data import DataSettings
        >>> DataSettings(name="digits", clients=5, partition="dirichlet", alpha=0.1).alpha
        0.1
    """

    generator: str | None = Field(
        None,
        description="Your own function, package.module:function, called as function(client, seed, "
        "**arguments). It returns the samples (x, y) of one client on demand, for any number "
        "of clients. It needs data.clients, and no other data set.",
    )
    test_clients: Annotated[int, Only("generator")] = Field(
        100,
        ge=1,
        description="generator: number of clients, sampled by the seed, that are read before the "
        "first round. Their samples give shape, classes, mean and std, and their test samples "
        "evaluate the global model. With test = 'clients', as many more clients are never used "
        "for training.",
    )
    cache: Annotated[int, Only("generator")] = Field(
        64,
        ge=0,
        description="generator: MiB of clients' samples that each process caches. The last "
        "client's samples are always cached.",
    )
    clients: int | None = Field(
        None,
        ge=1,
        description=f"Number of clients. Default: {DEFAULT_CLIENTS}, or all groups of a natural "
        "partition. A smaller number takes the first groups.",
    )
    partition: Literal["default", Scheme] | Place = Field(
        "default",
        description="iid: equal parts at random. dirichlet: each class is divided by Dirichlet "
        "shares. dirichlet-equal: each client has a Dirichlet class mix and the same number "
        "of samples. shards: each client gets shards of the samples sorted by class. counts: "
        "class_counts gives the number of samples of each client and class. natural: one "
        "client per writer, subject or sensor. Or your own as package.module:function, "
        f"called as {PARTITION}, which returns the number of each row's client, -1 for no "
        "client. Default: natural if your own data have groups, else dirichlet, or iid where "
        "the target has no classes.",
    )
    alpha: Annotated[float, Only("partition", "dirichlet", "dirichlet-equal")] = Field(
        0.4,
        gt=0,
        allow_inf_nan=False,
        description="Dirichlet concentration. Smaller values give more skewed classes.",
    )
    balance: Annotated[bool, Only("partition", "dirichlet")] = Field(
        False,
        description="dirichlet: whether a client that has more than the mean number of samples "
        "gets no more classes.",
    )
    shards_per_client: Annotated[int, Only("partition", "shards")] = Field(
        2, ge=1, description="shards: number of shards per client."
    )
    class_counts: tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="counts: number of samples of each client and class, as in [[30, 10], [5, "
        "45]]. With test_counts or an official test part, all are training samples.",
    )
    test_counts: Several[int] | None = Field(
        None,
        description="counts: number of test samples of each class. They come from samples that no "
        "client trains on, and go to the clients in proportion to their training classes.",
    )
    min_samples: int = Field(
        2,
        ge=1,
        description="Smallest number of training samples of a client. Natural groups with fewer "
        "are left out; other partitions raise an error.",
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of each client's training rows to test on, for choosing settings. The "
        "test rows are then not read. 0: none.",
    )
    exclude: Several[str] = Field(
        (),
        description="Clients to leave out, by name, after the data are divided. The others keep "
        "their rows.",
    )
    samples_per_client: int | None = Field(
        None, ge=1, description="Largest number of training samples of a client."
    )
    limit: int | None = Field(
        None,
        ge=1,
        description="Number of samples to use, chosen at random, for training (or for training and "
        "test, if the clients split their own).",
    )
    limit_test: int | None = Field(
        None, ge=1, description="Number of samples of the official test part to use."
    )
    test: Literal["default", "official", "clients"] | float = Field(
        "default",
        description="official: the clients share the official test part in proportion to their "
        "training classes. A fraction: each client uses this share of its own samples for "
        "testing. clients: with a generator, test_clients further clients are only for testing. "
        "Default: official if the data set has such a part, else 0.25.",
    )
    official_test: Literal["pooled", "unread"] = Field(
        "pooled",
        description="Use of the official test part if test is a fraction. pooled: it is "
        "partitioned with the training part. unread: it is not used, for example while you choose "
        "settings.",
    )

    standardize: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: samples are standardized with mean and std of the training rows. auto: "
        "the same, except for integers that your own network uses as ids, as embeddings do. off: "
        "the network gets x / scale, and 0 for missing values.",
    )
    label_noise: float = Field(
        0.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Classes: share of the training labels that are replaced by another class at "
        "random. Test labels are unchanged.",
    )
    label_noise_kind: Annotated[Literal["uniform", "next"], Only("label_noise")] = Field(
        "uniform",
        description="Class that replaces another. uniform: each with the same probability. next: "
        "the one after it in the order of the classes, and the first after the last, so that the "
        "noise depends on the class.",
    )
    summaries: Several[AbsolutePath] = Field(
        (),
        description="Own tables: files of fedbayes data summarize, one per client. Columns are "
        "encoded with their sums instead of the training rows.",
    )

    keep: Annotated[bool, Only("path")] = Field(
        False,
        description="Whether the run folder keeps a copy of path (a single file) and reads the "
        "copy from then on. A DataFrame is always copied.",
    )

    @field_validator("size")
    @classmethod
    def _positive(cls, size: tuple[int, ...]) -> tuple[int, ...]:
        if len(size) > 2 or any(side < 1 for side in size):
            raise ValueError("give one number of pixels, or height and width, each at least 1")
        return size

    @field_validator("standardize", mode="before")
    @classmethod
    def _in_words(cls, standardize: Any) -> Any:
        """`true` and `false` mean on and off."""
        return ("off", "on")[standardize] if isinstance(standardize, bool) else standardize

    @model_validator(mode="before")
    @classmethod
    def _own_by_path(cls, values: Any) -> Any:
        if isinstance(values, dict) and (values.get("path") or values.get("query")):
            return {"name": "own", **values}
        if isinstance(values, dict) and values.get("generator"):
            return {"name": GENERATOR, **values}
        name = values.get("name") if isinstance(values, dict) else None
        if isinstance(name, str) and name not in (*BUILT_IN, "own", GENERATOR) and ":" not in name:
            return {**values, "name": installed("data", name) or name}
        return values

    @model_validator(mode="after")
    def _agree(self) -> "DataSettings":
        self._check_name()
        self._check_source()
        if self.arguments and not (self.of_factory or self.generator):
            raise ValueError(
                f"data.arguments works only with your own factory. {self.name} takes none"
            )
        if self.keep and (self.path is None or self.more or not self.suffix or self.path.is_dir()):
            raise ValueError(
                f"data.keep copies a single file, and data.path is {self.path}. Leave data.keep out"
            )
        if self.query is not None:
            for setting in WRITTEN:
                if setting != "na_values" and getattr(self, setting) != _default(setting):
                    raise ValueError(
                        f"{setting} works only with files, and has no effect on a query"
                    )
        if self.crop and not self.size:
            raise ValueError("crop has no effect without size. Give both, or neither")
        if self.tokens is not None and self.processor is None:
            raise ValueError(
                "tokens needs a tokenizer. Set data.processor to a name on the Hugging Face hub "
                "or a folder (with model.name = 'transformers' the default is the model's)"
            )
        self._check_columns()
        if isinstance(self.test, float) and not 0 < self.test < 1:
            raise ValueError(f"test = {self.test} must be between 0 and 1, or 'official'")
        if (self.partition == "counts") != (self.class_counts is not None):
            raise ValueError("partition = 'counts' and class_counts need each other. Give both")
        if self.test_counts is not None and self.class_counts is None:
            raise ValueError("test_counts works only with partition = 'counts'")
        if self.class_counts is not None:
            self._check_counts(self.class_counts)
        return self

    def _check_name(self) -> None:
        """See that there is such a data set."""
        if self.generator is not None or self.name == GENERATOR:
            self._check_generator()
        elif self.test == "clients":
            raise ValueError(
                "test = 'clients' works only with a generator. Choose official or a fraction"
            )
        elif self.name not in (*BUILT_IN, "own") and not self.of_factory:
            if Path(self.name).suffix or Path(self.name).exists():
                raise ValueError(
                    f"unknown data set '{self.name}'. Give your own file or folder as data.path: "
                    f"--set data.path={self.name}"
                )
            like = did_you_mean(self.name, BUILT_IN)
            raise ValueError(
                f"unknown data set '{self.name}'{like}. Choose one of {', '.join(BUILT_IN)}, set "
                "data.path to your own data, or give your own factory as package.module:factory"
            )

    def _check_source(self) -> None:
        """See that it is said once where the data are, and as they can be read."""
        if self.missing == "drop" and self.of_factory:
            raise ValueError(
                f"missing = 'drop' has no effect on {self.name}. Leave such rows out in your "
                "factory"
            )
        if self.missing == "indicate" and self.name != "own":
            raise ValueError(
                "missing = 'indicate' works only with your own tables. Choose impute or drop"
            )
        if self.name == "own" and self.path is None and self.query is None:
            raise ValueError("name = 'own' needs your own data. Set data.path too")
        if holds_password(self.database):  # said without the URL
            raise ValueError(
                "a password in database would be written to run folders. Leave it out, and set "
                "FEDBAYES_DATABASE_PASSWORD, or the whole URL in FEDBAYES_DATABASE"
            )
        if self.path is not None and self.query is not None:
            raise ValueError("path and query exclude each other. Leave one of them out")
        if self.name != "own" and (self.path is not None or self.query is not None):
            given = f"path = {self.path}" if self.query is None else "query"
            raise ValueError(
                f"name = '{self.name}' and {given} exclude each other. Set name = 'own' for your "
                "own data, and leave the path out for a built-in data set"
            )

    @property
    def suffix(self) -> str:
        """The ending of the file at `path`, such as `.csv.gz`; empty if there is none."""
        ending = re.search(r"\.\w+(\.gz)?$", "" if self.path is None else self.path.name)
        return "" if ending is None else ending[0].lower()

    @property
    def source(self) -> str:
        """What is loaded, in a word."""
        return str(self.generator or self.path or self.name)

    def _check_generator(self) -> None:
        """See that nothing is set that is for a pool of samples."""
        if self.generator is None:
            raise ValueError("name = 'generator' needs generator = package.module:function")
        if self.name != GENERATOR:
            given = f"path = {self.path}" if self.path else f"name = '{self.name}'"
            raise ValueError(
                f"generator and {given} exclude each other: a generator gives all data"
            )
        if self.clients is None:
            raise ValueError("a generator can have any number of clients. Set data.clients")
        if self.test == "official":
            raise ValueError(
                "test = 'official' needs a data set with a test part. For a generator, set a "
                "fraction or 'clients'"
            )
        for setting, field in type(self).model_fields.items():
            if setting not in _OF_GENERATOR and getattr(self, setting) != field.default:
                raise ValueError(f"{setting} has no effect on a generator. Leave it out")

    def _check_columns(self) -> None:
        if self.summaries and self.name != "own":
            raise ValueError(
                f"summaries works only with your own data, and has no effect on {self.name}. "
                "Leave it out, or set data.path"
            )
        if self.tokens is not None and (self.features or self.drop):
            raise ValueError("tokens already chooses the input column. Leave out features and drop")
        if self.of_factory:
            for setting in _OF_TABLES:
                if getattr(self, setting) != _default(setting):
                    raise ValueError(
                        f"{setting} works only with tables, and has no effect on {self.name}. "
                        "Leave it out"
                    )
        elif self.name not in ("own", GENERATOR):
            for setting, field in SourceSettings.model_fields.items():
                if setting not in ANY_SET and getattr(self, setting) != field.default:
                    raise ValueError(
                        f"{setting} works only with your own data, and has no effect on "
                        f"{self.name}. Leave it out, or set data.path"
                    )
        for setting in ("label", "classes", "features", "summaries", *KINDS):
            names = getattr(self, setting)
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{setting} lists '{twice}' twice. List it once")
        self._check_kinds()
        if self.features and self.drop:
            raise ValueError(
                "features and drop exclude each other: features already lists all columns to use"
            )
        labels = [("label", column) for column in self.label]
        if self.group in self.label:
            raise ValueError(
                f"label and group are both '{self.group}', so each client would have a single "
                "label. Set one of them to another column"
            )
        for setting, column in (*labels, ("group", self.group), ("split", self.split)):
            if column in self.features:
                raise ValueError(
                    f"features lists '{column}', which is the {setting}. Leave it out of features"
                )

    def _check_kinds(self) -> None:
        """See that a column is named as one kind, and as a feature."""
        roles = {**dict.fromkeys(self.label, "label"), **dict.fromkeys(self.drop, "drop")}
        roles |= {name: role for role in ("group", "split") if (name := getattr(self, role))}
        for setting in KINDS:
            for name in getattr(self, setting):
                if name in roles:
                    raise ValueError(
                        f"{setting} and {roles[name]} both list '{name}'. Leave it out of one of "
                        "them"
                    )
                if self.features and name not in self.features:
                    raise ValueError(
                        f"{setting} lists '{name}', which features does not. Add it to features"
                    )
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
            raise ValueError("test_counts and test exclude each other. Leave test out")


def _default(setting: str) -> object:
    """What a setting of how data are read is, unless it is given."""
    return SourceSettings.model_fields[setting].default
