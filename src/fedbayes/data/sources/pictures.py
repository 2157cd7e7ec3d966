"""How pictures of any size become arrays of one: by settings, or as a pretrained network wants."""

from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.core import pretrained
from fedbayes.data.dataset import Array
from fedbayes.data.source_settings import SourceSettings
from fedbayes.errors import DataError

DEEP = ("I", "F", "I;16", "I;16B", "I;16L")
"""Modes of pictures that 8 bits do not hold."""
GREY = ("1", "L", "LA")
_BILINEAR = 2
_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


@dataclass(frozen=True)
class Framing:
    """What is done with a picture before it is an array: resized, then cropped in its middle."""

    size: tuple[int, int] | None = None
    """Height and width to resize to, whatever its proportions."""
    shortest: int | None = None
    """Or length of its shorter side, its proportions kept."""
    covering: bool = False
    """Or to the smallest size, its proportions kept, that covers what is cropped."""
    crop: tuple[int, int] | None = None
    """Height and width of the middle that is kept then."""
    channels: int = 0
    """3 for colour, 1 for grey; 0: as the pictures are."""
    resample: int = _BILINEAR
    """Filter of Pillow."""
    scale: float = 255.0
    """What pixels are divided by."""
    mean: tuple[float, ...] = ()
    """Of each channel, after that, to be subtracted; none: the data's own."""
    std: tuple[float, ...] = ()

    def open(self, source: Path | bytes, where: str) -> Any:
        """A picture, upright, in its mode. A DataError if it is damaged, or none; names where."""
        from PIL import Image, ImageOps

        try:
            with Image.open(source if isinstance(source, Path) else BytesIO(source)) as image:
                image.load()
                return ImageOps.exif_transpose(image)
        except Exception as error:  # Pillow raises of many classes
            reason = str(error).strip() or type(error).__name__
            raise DataError(
                f"cannot read the picture {where}: {reason.splitlines()[0]}. It is damaged or not "
                "a picture. Replace it, or remove it"
            ) from error

    def array(self, image: Any, where: str) -> Array:
        """A picture as uint8 [channels, height, width].

        Raises:
            DataError: it has more than 8 bits a channel; names where.
        """
        if image.mode in DEEP:
            raise DataError(
                f"{where} has more than 8 bits per pixel (mode {image.mode}). Save it with 8 "
                "bits, or give the numbers as an array x in an .npz file"
            )
        grey = self.channels == 1 or (not self.channels and image.mode in GREY)
        image = image.convert("L" if grey else "RGB")
        if self.size is not None:
            image = image.resize(self.size[::-1], self.resample)
        elif self.shortest is not None or self.covering:
            image = self._proportioned(image)
        if self.crop is not None:
            image = _middle(image, self.crop)
        pixels = np.asarray(image, np.uint8)
        return pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _proportioned(self, image: Any) -> Any:
        """A picture resized without a change of its proportions."""
        width, height = image.size
        least = self.crop if self.covering and self.crop is not None else (1, 1)
        factor = (self.shortest or 0) / min(width, height)
        if self.covering:
            factor = max(least[0] / height, least[1] / width)
        shape = (max(least[1], round(width * factor)), max(least[0], round(height * factor)))
        return image.resize(shape, self.resample)

    @property
    def statistics(self) -> tuple[Array, Array] | None:
        """Mean and std of the channels, float32; None: the data's own."""
        if not self.mean:
            return None
        return np.array(self.mean, np.float32), np.array(self.std, np.float32)


def _middle(image: Any, wanted: tuple[int, int]) -> Any:
    """The middle of a picture; black around one that is smaller."""
    width, height = image.size
    left, top = round((width - wanted[1]) / 2), round((height - wanted[0]) / 2)
    return image.crop((left, top, left + wanted[1], top + wanted[0]))


def framing(settings: SourceSettings) -> Framing:
    """What the settings say of pictures.

    Raises:
        DataError: they contradict one another, or the processor cannot be loaded.
    """
    size = settings.size
    if len(size) > 2:
        raise DataError(f"data.size has {len(size)} numbers. Give one, or height and width")
    pair = (size[0], size[-1]) if size else None
    found = Framing() if settings.processor is None else _of_processor(settings.processor)
    if pair is None:
        if settings.crop:
            raise DataError("data.crop has no effect without data.size. Give both")
        return found
    if settings.crop:
        return replace(found, size=None, shortest=None, covering=True, crop=pair)
    return replace(found, size=pair, shortest=None, crop=None)


def _of_processor(name: str) -> Framing:
    """As a pretrained network's processor has it."""
    if name.startswith(pretrained.TIMM):
        return _of_timm(pretrained.timm_data(name.removeprefix(pretrained.TIMM), DataError))
    try:
        found = pretrained.image_processor(name, DataError)
    except DataError as error:
        raise DataError(
            f"{error}. If samples are texts, set data.tokens to their column"
        ) from error
    size = dict(getattr(found, "size", None) or {})
    crop = dict(getattr(found, "crop_size", None) or {})
    both = (int(size["height"]), int(size["width"])) if "height" in size else None
    shortest = int(size["shortest_edge"]) if "shortest_edge" in size else None
    resizes = bool(getattr(found, "do_resize", False))
    if resizes and both is None and shortest is None:
        raise DataError(
            f"the image processor of {name} resizes by {', '.join(size) or 'nothing known'}, "
            "which is not supported. Set data.size"
        )
    crops = bool(getattr(found, "do_center_crop", False)) and "height" in crop
    normal = bool(getattr(found, "do_normalize", False))
    scaled = bool(getattr(found, "do_rescale", True))
    mean, std = (tuple(map(float, values)) for values in (found.image_mean, found.image_std))
    return Framing(
        size=both if resizes else None,
        shortest=shortest if resizes else None,
        crop=(int(crop["height"]), int(crop["width"])) if crops else None,
        channels=len(mean),
        resample=int(getattr(found, "resample", None) or _BILINEAR),
        scale=1 / float(found.rescale_factor) if scaled else 1.0,
        mean=mean if normal else (0.0,) * len(mean),
        std=std if normal else (1.0,) * len(mean),
    )


def _of_timm(config: dict[str, Any]) -> Framing:
    channels, height, width = config["input_size"]
    return Framing(
        shortest=int(min(height, width) / config["crop_pct"]),
        crop=(height, width),
        channels=channels,
        resample=_FILTERS.get(config["interpolation"], _BILINEAR),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )
