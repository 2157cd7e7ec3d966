"""The `[data]` table of a configuration."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedbayes.core.fields import AbsolutePath, Only, Place, Several, changed
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

_WORKS = {
    "arguments": "your own factory",
    "test = 'clients'": "a generator (choose official or a fraction)",
    "test = 'official'": "a data set that has a test part (choose a fraction or clients)",
    "missing = 'drop'": "tables (leave such rows out in your factory)",
    "summaries": "your own data (data.path)",
    **dict.fromkeys(WRITTEN, "files of your own (data.path)"),
}
"""What settings have an effect on, if not on all own data."""
_EXCLUDES = {
    "query": ("path",),
    "features": ("drop",),
    "tokens": ("features", "drop"),
    "test_counts": ("test",),
}
"""Settings that say the same as others, or what these leave nothing of."""
_NEEDS = {"crop": "size", "test_counts": "class_counts"}
"""Settings that say more of others."""
_LABEL_GROUP = ("label", "group")
"""Roles that no column has both of, else each client would have a single label."""

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
        self._check_effects()
        if holds_password(self.database):  # said without the URL
            raise ValueError(
                "a password in database would be written to run folders. Leave it out, and set "
                "FEDBAYES_DATABASE_PASSWORD, or the whole URL in FEDBAYES_DATABASE"
            )
        if self.keep and (self.path is None or self.more or not self.suffix or self.path.is_dir()):
            raise ValueError(
                f"data.keep copies a single file, and data.path is {self.path}. Leave data.keep out"
            )
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
        if self.class_counts is not None:
            self._check_counts(self.class_counts)
        return self

    def _check_name(self) -> None:
        """See that the data set exists, and that only one setting says where the data are."""
        given = f"path = {self.path}" if self.path else "query" * bool(self.query)
        if self.generator is not None and self.name != GENERATOR:
            given = given or f"name = '{self.name}'"
            raise ValueError(
                f"generator and {given} exclude each other: a generator gives all data"
            )
        if self.name == GENERATOR and self.generator is None:
            raise ValueError("name = 'generator' needs generator = package.module:function")
        if self.name == GENERATOR and self.clients is None:
            raise ValueError("a generator can have any number of clients. Set data.clients")
        if self.name == "own" and not given:
            raise ValueError("name = 'own' needs your own data. Set data.path too")
        if self.name in ("own", GENERATOR):
            return
        if self.name not in BUILT_IN and not self.of_factory:
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
        if given:
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

    @property
    def _idle(self) -> tuple[str, Collection[str]]:
        """What data these are, and settings that have no effect on them, or `name = value`."""
        every, files = set(type(self).model_fields), set(WRITTEN) - {"na_values"}
        if self.name == GENERATOR:
            return "a generator", (every - _OF_GENERATOR) | {"test = 'official'"}
        clients = {"test = 'clients'"}
        if self.of_factory:
            idle = {"missing = 'drop'", "missing = 'indicate'", "summaries", *_OF_TABLES}
            return f"{self.name}, a factory", idle | clients
        if self.name == "own":
            return "your own data", clients | {"arguments"} | (files if self.query else set())
        idle = {"missing = 'indicate'", "summaries", *SourceSettings.model_fields}
        return f"{self.name}, a built-in data set", idle - ANY_SET | clients

    def _check_effects(self) -> None:
        """See that settings have an effect on such data, and next to the others."""
        what, idle = self._idle
        for setting in (name for name in type(self).model_fields if changed(self, name)):
            value = f"{setting} = {getattr(self, setting)!r}"
            if setting in idle or value in idle:
                said = value if value in idle else setting
                of_source = "your own data (data.path)" * (setting in SourceSettings.model_fields)
                works = _WORKS.get(said, of_source)
                raise ValueError(
                    f"{said} has no effect on {what}{works and f': it works only with {works}'}. "
                    "Leave it out"
                )
            for other in _EXCLUDES.get(setting, ()):
                if changed(self, other):
                    raise ValueError(
                        f"{setting} and {other} exclude each other. Leave one of them out"
                    )
            if (needed := _NEEDS.get(setting)) and not changed(self, needed):
                raise ValueError(f"{setting} has no effect without {needed}. Give both, or neither")

    def _check_columns(self) -> None:
        """See that no column is listed twice, nor for two purposes."""
        for setting in ("label", "classes", "features", "summaries", *KINDS):
            names = getattr(self, setting)
            if (twice := next((n for n in names if names.count(n) > 1), None)) is not None:
                raise ValueError(f"{setting} lists '{twice}' twice. List it once")
        roles: dict[str, str] = {}
        for setting in ("label", "drop", "group", "split", *KINDS):
            value = getattr(self, setting)
            for name in (value,) if isinstance(value, str) else value or ():
                if name in roles and (setting in KINDS or (roles[name], setting) == _LABEL_GROUP):
                    raise ValueError(
                        f"{setting} and {roles[name]} both list '{name}'. Leave it out of one of "
                        "them"
                    )
                if setting in KINDS and self.features and name not in self.features:
                    raise ValueError(
                        f"{setting} lists '{name}', which features does not. Add it to features"
                    )
                if setting not in KINDS and name in self.features:
                    raise ValueError(
                        f"features lists '{name}', which is the {setting}. Leave it out of features"
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
