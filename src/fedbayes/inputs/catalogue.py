"""Input priors by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedbayes.core.wording import listed, size
from fedbayes.errors import ConfigError, DataError, not_among

if TYPE_CHECKING:
    from fedbayes.data.tables.columns import Column
    from fedbayes.data.tables.sums import Sums
    from fedbayes.inputs.prior import InputPrior
    from fedbayes.inputs.spectra import Spectra

PRIORS: dict[str, str] = {
    "auto": "by the shape of an input: leaves, strokes, noise or gaussian",
    "leaves": "photographs: random shapes that hide each other",
    "strokes": "writing: pen strokes, light on a dark ground",
    "noise": "signals or textures: 1/f^a noise",
    "tones": "sound and other signals with a pitch: harmonic tones in noise",
    "gaussian": "rows of a table: standard normal, or from the clients' sums",
    "texts": "texts: sampled from the base network; for networks of texts",
}
"""Names of input priors, and what they are for."""
AXES = {"leaves": (3,), "strokes": (3,), "noise": (1, 2, 3), "tones": (1, 2), "gaussian": (1,)}
"""How many axes an input has."""
FILTERED = ("leaves", "strokes", "noise", "tones")
"""Priors that can have the clients' mean and spectra; the first are chosen where equal."""


def build_prior(
    name: str,
    shape: Sequence[int],
    *,
    sums: "Sums | Spectra | None" = None,
    features: Sequence[str] = (),
    columns: Sequence["Column"] = (),
) -> "InputPrior":
    """An input prior.

    Args:
        name: one of `PRIORS`; `package.module:function`; or a folder or file of real samples.
        shape: of one input: channels, height and width of an image, the length of a row.
        sums: of the clients' rows, for `gaussian`; or of their images or signals, for the others.
        features: columns of a table of real samples to take.
        columns: those that are encoded as the features, where they are no plain numbers.

    Returns:
        The prior; where the choice was left to the shape, its `notes` say what was chosen, and why.

    Raises:
        ConfigError: there is no such prior, or it draws no inputs of this shape.
        DataError: real samples cannot be read, or sums are of other features.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.inputs import build_prior
        >>> prior = build_prior("auto", (3, 32, 32))
        >>> prior.name, tuple(prior.draw(4, np.random.default_rng(0)).shape)
        ('leaves', (4, 3, 32, 32))
    """
    shape = tuple(int(length) for length in shape)
    if not shape or min(shape) < 1:
        raise ConfigError(f"an input cannot have the shape {shape}. All lengths must be 1 or more")
    from fedbayes.inputs.spectra import Spectra

    if isinstance(sums, Spectra):
        return _filtered(name, shape, sums)
    chosen, why = choose(shape, sums) if name == "auto" else (name, "")
    if sums is not None and chosen != "gaussian":
        raise ConfigError(
            f"sums of rows have no effect on {chosen!r}. They work only with gaussian"
        )
    prior = _built(chosen, shape, sums, features, columns)
    if why:
        prior.notes = (f"inputs are sampled from {chosen!r}: {why}", *prior.notes)
    return prior


def _filtered(name: str, shape: tuple[int, ...], spectra: "Spectra") -> "InputPrior":
    """A prior with the clients' mean and spectra; auto: that whose own are the nearest."""
    from fedbayes.inputs.spectra import Filtered

    if name != "auto" and name not in FILTERED:
        raise ConfigError(
            f"sums of images or signals have no effect on {name!r}. They work only with auto, "
            f"{listed(FILTERED)}"
        )
    names = [known for known in FILTERED if len(shape) in AXES[known]]
    names = names if name == "auto" else [name]
    priors = [Filtered(_built(known, shape, None, (), ()), spectra) for known in names]
    prior = min(priors, key=lambda each: each.distance)
    if name == "auto":
        prior.notes = (
            f"inputs are sampled from {prior.name!r}, whose spectra are nearest to the clients'",
            *prior.notes,
        )
    return prior


def choose(shape: tuple[int, ...], sums: "Sums | None" = None) -> tuple[str, str]:
    """The prior for inputs of a shape, and why it was chosen."""
    if sums is not None:
        return "gaussian", "the clients sent sums of their rows"
    if len(shape) == 1:
        return "gaussian", f"an input is a row of {shape[0]} values; without sums, standard normal"
    if len(shape) == 2:
        return "noise", (
            f"an input of {size(shape)} is read as channels of a signal; for sound choose tones"
        )
    if len(shape) == 3 and shape[0] == 1:
        return "strokes", (
            "an image of one channel is read as writing, light on dark; for grey photographs "
            "choose leaves"
        )
    if len(shape) == 3:
        return "leaves", f"an image of {shape[0]} channels is read as a photograph"
    raise ConfigError(
        f"no input prior is known for inputs of {size(shape)}. Give package.module:function, or a "
        "file of real samples"
    )


def _built(
    name: str,
    shape: tuple[int, ...],
    sums: "Sums | None",
    features: Sequence[str],
    columns: Sequence["Column"],
) -> "InputPrior":
    from fedbayes.inputs.gaussian import GaussianInputs
    from fedbayes.inputs.leaves import Leaves
    from fedbayes.inputs.noise import NoiseInputs
    from fedbayes.inputs.own import OwnPrior
    from fedbayes.inputs.samples import RealSamples
    from fedbayes.inputs.strokes import Strokes
    from fedbayes.inputs.tones import Tones

    if name in AXES and len(shape) not in AXES[name]:
        raise ConfigError(
            f"{name!r} gives {PRIORS[name].partition(':')[0]}, but an input has the shape "
            f"{size(shape)}. Give the shape as channels, height and width of an image or as the "
            "length of a row, or choose another prior"
        )
    drawn: dict[str, type[Leaves | Strokes | NoiseInputs | Tones]] = {
        "leaves": Leaves,
        "strokes": Strokes,
        "noise": NoiseInputs,
        "tones": Tones,
    }
    if name in drawn:
        return drawn[name](shape)
    if name == "gaussian":
        return GaussianInputs(shape, sums)
    if name == "texts":
        raise ConfigError(
            "'texts' works only with pretrained networks of texts, but an input has the shape "
            f"{size(shape)}. Choose another prior"
        )
    if Path(name).exists():
        return RealSamples(Path(name), shape, features, columns)
    if ":" in name:
        return OwnPrior(name, shape)
    if Path(name).suffix or len(Path(name).parts) > 1:
        raise DataError(f"file or folder of samples not found: {name}")
    own = "package.module:function, or a folder or file of samples"
    raise ConfigError(not_among("input prior", name, PRIORS, own))
