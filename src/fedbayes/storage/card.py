"""What a model file says of the model in it."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fedbayes.config.config import Config, complete_task
from fedbayes.core.brief import Brief
from fedbayes.core.pretrained import PADDING
from fedbayes.core.wording import listed
from fedbayes.data import Preprocessing
from fedbayes.data.source_settings import WRITTEN, SourceSettings
from fedbayes.errors import ModelError, told_as
from fedbayes.likelihoods import Classes, Likelihood, build_likelihood, default_likelihood
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.conformal import Conformal
from fedbayes.likelihoods.hazards import Hazards
from fedbayes.models import ModelSettings
from fedbayes.version import __version__

WEIGHTS_INPUTS = "standardized samples: (x / scale − mean) / std; 0 if missing"
"""What the network of a file of weights takes."""
PROGRAM_INPUTS = "raw samples [n, ...], NaN where a value is missing"
"""What a program takes."""
TOKENS_INPUTS = f"ids of tokens [n, length], {PADDING} after the end of a text"
"""The same, of texts."""
OWN = ("task.likelihood", "model.name", "method.name", "data.name")
"""Settings that may name what is in a module of the user's own."""
_READERS = {"source", "trusted"}
"""What a card does not say of itself."""
_FRAMING = ("processor", "size", "crop", "scale")
"""Settings of data that say how pictures become arrays."""
_READING = set(SourceSettings.model_fields) - {"dir", "path", "more", "query", "database"}


def program_inputs(preprocessing: Preprocessing) -> str:
    """What a program with this preprocessing takes."""
    return PROGRAM_INPUTS if preprocessing.tokens is None else TOKENS_INPUTS


@dataclass(frozen=True, repr=False)
class Card(Brief):
    """Where a model comes from, and how it is used; JSON in the metadata of its file.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.storage.card import Card
        >>> result = fedbayes.run(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}, out="carded"
        ... )
        >>> card = Card.of(result.config, result.preprocessing, 1)
        >>> card.round, card.task["likelihood"]
        (1, 'categorical')
    """

    preprocessing: Preprocessing
    """What the network sees of a raw sample; names of classes and features."""
    model: dict[str, Any]
    """The `[model]` table of its config, but for the weights that it started from; empty for a
    fully connected ReLU network of any names."""
    method: dict[str, Any]
    """The `[method]` table likewise, or how it was fused."""
    data: dict[str, Any]
    """Those settings of the `[data]` table that say which data, and how they are read."""
    round: int
    """The round after which it was taken."""
    client: str = ""
    """Whose own network it is; empty for the global model."""
    inputs: str = WEIGHTS_INPUTS
    """What goes in, in words for people."""
    outputs: str = ""
    """What comes out, in words for people."""
    task: dict[str, Any] = field(default_factory=dict)
    """The `[task]` table of its config, its likelihood by name; empty before 0.2: classes."""
    frozen: str = ""
    """Digest of the frozen weights that the model was trained with, where its file leaves them
    out (`Network.constants_digest`); empty if it holds the whole network."""
    attack: dict[str, Any] = field(default_factory=dict)
    """The `[attack]` table of its config; empty of an honest run."""
    conformal: Conformal | None = None
    """The threshold of its sets or intervals, from `fedbayes calibrate --method conformal`."""
    hazards: Hazards | None = None
    """The baseline hazard of its log-risks, from `fedbayes calibrate --method hazards`."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Of its probabilities, where it is calibrated and its outputs are not at it already."""
    counts: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Training samples of each class of the client whose network it is, where its file tells."""
    fedbayes: str = ""
    """Version of the package that wrote it."""
    source: str = field(default="", compare=False)
    """The file that it was read from; empty where a run folder says the same."""
    trusted: frozenset[str] = field(default=frozenset(), compare=False)
    """What may be imported although the file names it: its reader did too."""

    @classmethod
    def of(
        cls, config: Config, preprocessing: Preprocessing, number: int, client: str = ""
    ) -> "Card":
        """The card of the model of a run.

        Args:
            config: of the run.
            preprocessing: of its data.
            number: rounds done.
            client: name of the client, where it is one's own network.
        """
        task = dict(config.task)
        if task["likelihood"] == "auto":
            task["likelihood"] = default_likelihood(preprocessing.target)
        card = cls(
            preprocessing,
            config.model.model_dump(mode="json", exclude={"weights"}),
            dict(config.closed().method),
            config.data.model_dump(mode="json", include=_READING, exclude_none=True),
            number,
            client,
            task=task,
            attack=config.attack.model_dump(exclude_none=True) if config.attack.active else {},
            fedbayes=__version__,
        )
        return replace(card, outputs=network_outputs(card.likelihood))

    def of_fused(self, method: str) -> "Card":
        """The card of what this model and others were fused to, of which no calibration holds."""
        return replace(
            self,
            method={"name": f"fuse {method}"},
            client="",
            conformal=None,
            hazards=None,
            temperature=None,
            counts=None,
        )

    @property
    def fused(self) -> bool:
        """Whether it is of networks that were fused: a plain one, whatever trained them."""
        return str(self.method.get("name", "")).startswith("fuse ")

    @property
    def by_hand(self) -> bool:
        """Whether networks without cards were fused, so that what is known of their inputs is what
        the command line said: images are in [0, 1], and classes are numbers.
        """
        return self.fused and not self.data

    @property
    def expects(self) -> str:
        """What goes in, with its shape and range, in a line for people."""
        shape = ", ".join(map(str, ("n", *self.preprocessing.shape)))
        if not self.inputs.startswith(PROGRAM_INPUTS):
            return f"{self.inputs}; shape ({shape})"
        bounds = self.preprocessing.raw_range
        values = "" if bounds is None else f", with values from {bounds[0]:g} to {bounds[1]:g}"
        return f"{self.inputs}; shape ({shape}){values}, and standardizes them itself"

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs of the network mean for the target.

        Raises:
            ConfigError: it is not installed here.
            ModelError: as for `require_trusted`.
        """
        self.require_trusted("task.likelihood")
        task = complete_task({"likelihood": "auto", **self.task})
        return build_likelihood(task.pop("likelihood"), self.preprocessing.target, **task)

    def network(self, way: str = "") -> ModelSettings | None:
        """The network that the card names; None for a fully connected one of any names.

        Raises:
            ModelError: as for `require_trusted`, with the same `way`.
        """
        if not self.model:
            return None
        self.require_trusted("model.name", way=way)
        return Config.create(model=self.model).model

    @property
    def reading(self) -> SourceSettings:
        """How pictures and cells of tables became samples.

        Raises:
            ModelError: the card does not say it in proper settings.
        """
        given = {name: self.data[name] for name in (*_FRAMING, *WRITTEN) if name in self.data}
        with told_as(ModelError, f"the card of {self.source} is damaged: data", ValidationError):
            return SourceSettings(**given)

    def require_trusted(self, key: str, *, way: str = "") -> None:
        """Check that no stranger's file decides what is imported or run.

        Args:
            key: of the setting to be looked up, one of `OWN`.
            way: the remedy in the message; by default that of `fedbayes evaluate` and `predict`.

        Raises:
            ModelError: it is `package.module:name` in a file whose reader did not name it.
        """
        table, _, entry = key.partition(".")
        name = getattr(self, table).get(entry)
        if self.source and isinstance(name, str) and ":" in name and name not in self.trusted:
            way = way or f"If you trust it, add --set {key}={name}"
            raise ModelError(
                f"{self.source} needs the code {key} = {name!r}, and fedbayes never runs code "
                f"only because a file lists it. {way}"
            )

    @classmethod
    def load(cls, text: str, source: str, trusted: Collection[str] = ()) -> "Card":
        """The inverse of `dump`.

        Args:
            text: what `dump` gave.
            source: the file that it is from.
            trusted: what may be imported if it names it, as `package.module:name`.

        Raises:
            ModelError: it is no card; names the source.
        """
        with told_as(ModelError, f"the card of {source} is damaged", ValidationError):
            card = TypeAdapter(cls).validate_json(text)
        for table, _, entry in (key.partition(".") for key in OWN):
            if not isinstance(getattr(card, table).get(entry, ""), str):
                raise ModelError(f"the card of {source} is damaged: {table}.{entry} is not text")
        return replace(card, source=source, trusted=frozenset(trusted))

    def dump(self) -> str:
        """As JSON."""
        return TypeAdapter(Card).dump_json(self, exclude=_READERS).decode()


def network_outputs(likelihood: Likelihood) -> str:
    """What to say of the outputs of a network of this likelihood."""
    if isinstance(likelihood, Categorical):
        return "logits [n, classes]; their softmax is the probability of each class"
    return (
        f"outputs of the network [n, width], parameters of the likelihood {likelihood.name} for "
        f"{listed(likelihood.target.names)}"
    )


def program_outputs(likelihood: Likelihood) -> str:
    """What to say of the answers of a program, which are in the unit of the target."""
    names = listed(likelihood.target.names)
    if isinstance(likelihood, Categorical):
        return network_outputs(likelihood)
    if isinstance(likelihood, Classes):
        return "log-probabilities [n, classes]"
    if likelihood.target.kind == "labels":
        return f"probability of each label [n, labels]: {names}"
    if likelihood.target.kind == "survival":
        return f"relative log-risk [n, 1] of {names}"
    return f"predictive mean [n, columns] in the unit of the target: {names}"
