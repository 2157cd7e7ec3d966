"""The likelihoods: how outputs of a network and a target belong together; one file each.

A new likelihood is a class in a file of its own and a line in `LIKELIHOODS`; a new metric is a row
of `MEASURES`. Nothing here knows clients or rounds. Names of scores are stored in run folders, so
they must stay.

A `Target` (`core/targets.py`) says what is predicted, and a `Likelihood` joins it to a network.
Targets stay in their own unit everywhere: the network works in standardized units, and the
likelihood maps. Scores are sums over samples, so they add over clients and processes. A metric that
is no sum, such as AUROC, needs predictions: it is computed where they are, and a client sends its
value besides its sums. Predictions are of draws, [draws, n, width]: one for single weights, several
for an ensemble or a posterior, and every method is scored by the mixture. Where samples depend on
one another (`Likelihood.coupled`, as for `cox`), they are evaluated together, client by client.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedbayes.core.lazy import Catalogue, attributes, own_class, placed
from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from fedbayes.likelihoods.base import Classes, Likelihood
    from fedbayes.likelihoods.evaluation import (
        Predictor,
        Scores,
        evaluate,
        parted,
        predictor,
        score_names,
        scored,
        total,
    )
    from fedbayes.likelihoods.numeric import Numeric, Parametric

__all__ = [
    "LIKELIHOODS",
    "Classes",
    "Likelihood",
    "Numeric",
    "Parametric",
    "Predictor",
    "Scores",
    "build_likelihood",
    "complete_likelihood",
    "default_likelihood",
    "evaluate",
    "find_likelihood",
    "parted",
    "predictor",
    "score_names",
    "scored",
    "total",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "fedbayes.likelihoods.base": "Classes Likelihood",
        "fedbayes.likelihoods.evaluation": (
            "Predictor Scores evaluate parted predictor score_names scored total"
        ),
        "fedbayes.likelihoods.numeric": "Numeric Parametric",
    },
)


LIKELIHOODS: Mapping[str, "type[Likelihood]"] = Catalogue(
    "fedbayes.likelihoods",
    {
        "categorical": ("categorical", "Categorical"),
        "bernoulli": ("bernoulli", "Bernoulli"),
        "multilabel": ("multilabel", "Multilabel"),
        "gaussian": ("gaussian", "Gaussian"),
        "poisson": ("poisson", "Poisson"),
        "student-t": ("student", "StudentT"),
        "quantile": ("quantile", "Quantile"),
        "cox": ("cox", "Cox"),
    },
)
"""Every built-in likelihood by its name; the names are known without importing PyTorch."""

_DEFAULTS = {
    "class": "categorical",
    "labels": "multilabel",
    "real": "gaussian",
    "count": "poisson",
    "survival": "cox",
}
_SAMPLES = {
    "class": Target("class", ("0", "1")),
    "labels": Target("labels", ("0",)),
    "real": Target("real", ("0",), (0.0,), (1.0,)),
    "count": Target("count", ("0",)),
    "survival": Target("survival", ("time", "event")),
}
"""A target of each kind, to check settings with where the data's own is not known yet."""


def default_likelihood(target: Target) -> str:
    """The likelihood that `auto` stands for: categorical, multilabel, gaussian, poisson or cox."""
    return _DEFAULTS[target.kind]


def find_likelihood(name: str) -> "type[Likelihood]":
    """The likelihood class of this name, or of `package.module:Class`.

    Raises:
        ConfigError: there is none.
    """
    place = placed("likelihood", name, ("auto", *LIKELIHOODS))
    if place in LIKELIHOODS:
        return LIKELIHOODS[place]
    from fedbayes.likelihoods.base import Likelihood

    kind: type[Likelihood] = own_class(place, Likelihood, "likelihood")
    return kind


def build_likelihood(name: str, target: Target, **settings: Any) -> "Likelihood":
    """The likelihood of this name for this target.

    Args:
        name: one of `LIKELIHOODS`, `auto`, or `package.module:Class`.
        target: what is to be predicted.
        settings: the likelihood's own.

    Raises:
        ConfigError: there is no such likelihood or setting, a value is not allowed, or the
            likelihood does not take such a target.

    Examples:
        >>> import torch
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import build_likelihood
        >>> likelihood = build_likelihood("auto", Target("class", ("no", "yes")))
        >>> likelihood.name, float(likelihood.nll(torch.zeros(1, 2), torch.tensor([1])).exp())
        ('categorical', 2.0)
    """
    name = default_likelihood(target) if name == "auto" else name
    kind = find_likelihood(name)
    if target.kind not in kind.kinds:
        takers = [other for other, one in LIKELIHOODS.items() if target.kind in one.kinds]
        raise ConfigError(
            f"the likelihood {name} works with {' or '.join(kind.kinds)} targets, but this target "
            f"is of kind {target.kind}. Choose {' or '.join(takers)}"
        )
    try:
        return kind(target=target, **settings)
    except ValidationError as error:
        raise ConfigError(_explain(name, kind, error)) from None


def complete_likelihood(name: str, **settings: Any) -> dict[str, Any]:
    """The settings of a likelihood with defaults filled in, before there is a target.

    Raises:
        ConfigError: as for `build_likelihood`; or there are settings besides `auto`, of which it
            is not known yet whose they are.
    """
    if name == "auto":
        for key in settings:
            owners = [name for name, kind in LIKELIHOODS.items() if key in kind.model_fields]
            whose = (
                f"a setting of {', '.join(owners)}" if owners else "not a setting of any likelihood"
            )
            raise ConfigError(f"task.{key} is {whose}. Set task.likelihood")
        return {}
    target = _SAMPLES[find_likelihood(name).kinds[0]]
    return build_likelihood(name, target, **settings).model_dump(mode="json")


def _explain(name: str, kind: "type[Likelihood]", error: ValidationError) -> str:
    """A line for each setting: its key, its value, and what is allowed."""
    known = [field for field in kind.model_fields if field != "target"]
    lines: dict[str, str] = {}
    for details in error.errors():
        key = str(details["loc"][0]) if details["loc"] else ""
        message = details["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
        message = message[:1].lower() + message[1:]
        if details["type"] == "extra_forbidden":
            has = f"it has {', '.join(known)}" if known else "it has none"
            lines[key] = f"task.{key} is not a setting of {name}{did_you_mean(key, known)}; {has}"
        elif key in lines:
            lines[key] += f", or {message}"
        else:
            lines[key] = f"task.{key} is {details['input']!r}; {message}"
    return "\n".join(lines.values())
