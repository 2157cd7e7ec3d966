"""Pictures of a folder to be predicted, piece by piece."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedbayes.core.wording import size
from fedbayes.data.dataset import Array
from fedbayes.data.sources.folders import BATCH, SUFFIXES, picture_files
from fedbayes.data.sources.pictures import Framing
from fedbayes.data.sources.streams import Piece
from fedbayes.errors import DataError


def are_pictures(path: Path) -> bool:
    """Whether a path is a folder, or by its name a picture."""
    return path.is_dir() or path.suffix.lower() in SUFFIXES


@dataclass
class PictureRows:
    """The pictures below a folder in rising order of their names, in pieces; or a single one."""

    path: Path
    framing: Callable[[], Framing]
    """How the pictures of the training became arrays."""
    shape: tuple[int, ...]
    """Of one sample, as the model reads it."""
    scale: float
    """What the model divides raw samples by."""
    classes: tuple[str, ...] = ()
    """Names of the model's classes: where every picture lies in a folder of such a name, it is
    kept as column `class`."""
    size: int = BATCH
    """Pictures of a piece."""
    share: float | None = 0.0
    """How many have been read, of 1."""
    notes: list[str] = field(default_factory=list)
    """What a user should know."""

    @property
    def where(self) -> str:
        """What messages call the pictures."""
        return str(self.path)

    def __iter__(self) -> Iterator[Piece]:
        """The pieces: pixels uint8 [n, C, H, W], and `file`, the path below the folder.

        Raises:
            DataError: there are no pictures, the model reads none, or one is damaged or of another
                size; names its file.
        """
        import pandas as pd

        if not self.path.exists():
            raise DataError(f"no such folder or picture: {self.path}")
        whole = self.path.is_dir()
        folder = self.path if whole else self.path.parent
        files = picture_files(folder) if whole else [self.path]
        if not files:
            raise DataError(f"{folder} contains no pictures ({', '.join(SUFFIXES)})")
        frame = self._frame()
        names = [file.relative_to(folder).as_posix() for file in files]
        known = whole and all(file.parent.name in self.classes for file in files)
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(files), min(self.size, BATCH)):
                part = slice(start, start + min(self.size, BATCH))
                kept = pd.DataFrame({"file": names[part]})
                if known:
                    kept["class"] = [file.parent.name for file in files[part]]
                x = np.stack(list(pool.map(lambda file: self._one(file, frame), files[part])))
                self.share = min(part.stop, len(files)) / len(files)
                yield Piece(x, kept, start)

    def _frame(self) -> Framing:
        """How pictures become samples of the model."""
        if len(self.shape) != 3 or self.shape[0] not in (1, 3):
            raise DataError(
                f"{self.path} contains pictures, but the model reads samples of "
                f"{size(self.shape)} numbers. Give samples as in training"
            )
        frame = self.framing()
        made = frame.crop or frame.size
        if made is not None and made != self.shape[1:]:
            raise DataError(
                f"the model reads samples of {size(self.shape)}, but its settings turn pictures "
                f"into {size(made)}. Export it again"
            )
        if frame.scale != self.scale:
            raise DataError(
                f"{self.path} contains pictures with pixels from 0 to 255, but the model was "
                f"trained on numbers divided by {self.scale:g}. Give the samples as in training, "
                "as an array x [n, ...] in a .npz file"
            )
        return replace(frame, channels=self.shape[0])

    def _one(self, file: Path, frame: Framing) -> Array:
        """A picture as a sample."""
        array = frame.array(frame.open(file, str(file)), str(file))
        if array.shape != self.shape:
            raise DataError(
                f"{file} is {size(array.shape)} (channels, height, width), and the model reads "
                f"{size(self.shape)}. Resize it (models trained with data.size do this)"
            )
        return array
