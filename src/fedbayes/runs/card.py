"""What a model file says of the model in it."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedbayes.data import Preprocessing
from fedbayes.data.settings import SourceSettings
from fedbayes.errors import ModelError
from fedbayes.runs.config import Config

WEIGHTS_INPUTS = "samples that were standardized: x / scale, minus mean, by std; 0 where missing"
"""What the network of a file of weights takes."""
PROGRAM_INPUTS = "raw samples [n, ...], NaN where a value is missing"
"""What a program takes."""
_READING = set(SourceSettings.model_fields) - {"dir", "path"}
_OUTPUTS = "logits [n, classes]; their softmax is the probability of each class"


@dataclass(frozen=True)
class Card:
    """Where a model comes from, and how it is used; JSON in the metadata of its file."""

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
    """What goes in."""
    outputs: str = _OUTPUTS
    """What comes out."""
    fedbayes: str = ""
    """Version of the package that wrote it."""

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
        return cls(
            preprocessing,
            config.model.model_dump(mode="json", exclude={"weights"}),
            dict(config.method),
            config.data.model_dump(mode="json", include=_READING, exclude_none=True),
            number,
            client,
            fedbayes=_version(),
        )

    @classmethod
    def load(cls, text: str, source: str) -> "Card":
        """The inverse of `dump`.

        Raises:
            ModelError: it is no card; names the source.
        """
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            reason = error.errors()[0]
            place = ".".join(map(str, reason["loc"]))
            raise ModelError(f"the card of {source} is damaged: {place} {reason['msg']}") from None

    def dump(self) -> str:
        """As JSON."""
        return TypeAdapter(Card).dump_json(self).decode()


def _version() -> str:
    try:
        return version("fedbayes")
    except PackageNotFoundError:
        return ""
