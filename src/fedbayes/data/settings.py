"""The `[data]` table of a configuration."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedbayes.core.fields import Only, Place, Several
from fedbayes.core.lazy import installed
from fedbayes.core.pretrained import absolute
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
        "**arguments). It returns the samples (x, y) of one client on demand, for any number of "
        "clients. It needs clients, and no other data set.",
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
        description=f"Number of clients. Default: {DEFAULT_CLIENTS}, or all groups of a "
        "natural partition. A number takes the first groups.",
    )
    partition: Literal["default", Scheme] | Place = Field(
        "default",
        description="iid: equal parts at random. dirichlet: each class is divided by "
        "Dirichlet shares. dirichlet-equal: each client has a Dirichlet class mix and the same "
        "number of samples. shards: each client gets shards of the samples sorted by class. "
        "counts: each client gets so many of each class as class_counts says. "
        "natural: one client per writer, subject or sensor. Or your own as "
        f"package.module:function, called as {PARTITION}, which returns the number of each row's "
        "client, -1 for nobody. Default: natural where your own data name groups, else dirichlet, "
        "or iid where the target has no classes.",
    )
    alpha: Annotated[float, Only("partition", "dirichlet", "dirichlet-equal")] = Field(
        0.4,
        gt=0,
        allow_inf_nan=False,
        description="Dirichlet concentration: the smaller, the more skewed are the clients' "
        "classes.",
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
        description="Share of each client's training rows that it is tested on instead of its test "
        "rows, which are left unread: for choosing settings. 0: none.",
    )
    exclude: Several[str] = Field(
        (),
        description="Clients to leave out, by name, once the data are divided: the others keep "
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
    summaries: Several[Path] = Field(
        (),
        description="Own tables: files of fedbayes data summarize, one per client. Columns are "
        "encoded with their sums instead of the training rows.",
    )

    keep: Annotated[bool, Only("path")] = Field(
        False,
        description="Whether the run folder keeps a copy of path (a single file) and reads the "
        "copy from then on. A DataFrame is always copied.",
    )

    @field_validator("summaries", "more")
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
            raise ValueError(f"arguments are for your own factory; {self.name} takes none")
        if self.keep and (self.path is None or self.more or not self.suffix or self.path.is_dir()):
            raise ValueError(f"keep copies a single file, and path is {self.path}; leave keep out")
        if self.query is not None:
            for setting in WRITTEN:
                if setting != "na_values" and getattr(self, setting) != _default(setting):
                    raise ValueError(f"{setting} is for files, and has no effect on a query")
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

    def _check_name(self) -> None:
        """See that there is such a data set."""
        if self.generator is not None or self.name == GENERATOR:
            self._check_generator()
        elif self.test == "clients":
            raise ValueError(
                "test = 'clients' holds out whole clients of a generator, whose number has no end; "
                "choose official or a fraction"
            )
        elif self.name not in (*BUILT_IN, "own") and not self.of_factory:
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

    def _check_source(self) -> None:
        """See that it is said once where the data are, and as they can be read."""
        if self.missing == "drop" and self.of_factory:
            raise ValueError(
                f"missing = 'drop' has no effect on what {self.name} gives; leave such rows out "
                "there"
            )
        if self.missing == "indicate" and self.name != "own":
            raise ValueError("missing = 'indicate' is for your own tables; choose impute or drop")
        if self.name == "own" and self.path is None and self.query is None:
            raise ValueError("name = 'own' needs the path of your own data; give path too")
        if holds_password(self.database):  # said without the URL
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
                f"generator and {given} exclude one another: a generator gives all the data"
            )
        if self.clients is None:
            raise ValueError(
                "a generator has as many clients as one likes; say how many with clients"
            )
        if self.test == "official":
            raise ValueError(
                "test = 'official' is of a set with a test part; of a generator it is a fraction, "
                "or 'clients'"
            )
        for setting, field in type(self).model_fields.items():
            if setting not in _OF_GENERATOR and getattr(self, setting) != field.default:
                raise ValueError(
                    f"{setting} divides or reads a set of samples, and has no effect on what a "
                    "generator gives; leave it out"
                )

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
                if getattr(self, setting) != _default(setting):
                    raise ValueError(
                        f"{setting} is for tables, and has no effect on what {self.name} gives; "
                        "leave it out"
                    )
        elif self.name not in ("own", GENERATOR):
            for setting, field in SourceSettings.model_fields.items():
                if setting not in ANY_SET and getattr(self, setting) != field.default:
                    raise ValueError(
                        f"{setting} is for your own data, and has no effect on {self.name}; "
                        "leave it out, or give the path of your own data"
                    )
        for setting in ("label", "classes", "features", "summaries", *KINDS):
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


def _default(setting: str) -> object:
    """What a setting of how data are read is, unless it is given."""
    return SourceSettings.model_fields[setting].default
