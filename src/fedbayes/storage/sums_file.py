"""`SHA256SUMS`: digests of what a run left at its end, as `sha256sum` writes and reads them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fedbayes.core.files import digest, read_text
from fedbayes.errors import RunError


class SumsFile:
    """The digests of one run.

    Args:
        path: of the file.
        summary: what is written last.
        resume: the command that writes both again.
    """

    def __init__(self, path: Path, summary: Path, resume: Callable[[], str]) -> None:
        self.path, self._summary, self._resume = path, summary, resume

    def check(self, path: Path, data: bytes) -> None:
        """See that a file is what `SHA256SUMS`, if there is one, says, or raise a RunError."""
        self.compare(path, data, self.read())

    def read(self) -> dict[str, str] | None:
        """Digests of what the run left at its end, by name; None where it has not ended, or under
        an older version.
        """
        try:
            lines = read_text(self.path).splitlines()
            return {name: value for value, name in (line.split("  ") for line in lines)}
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} is damaged ({error}). {self._way_out}") from None

    def compare(self, path: Path, data: bytes, sums: Mapping[str, str] | None) -> None:
        """As `check`, with digests that were read before; None compares nothing."""
        if sums is not None and sums.get(path.name) != digest(data):
            raise RunError(
                f"{path} or {self.path.name} next to it is damaged: their checksums differ. "
                f"{self._way_out}"
            )

    @property
    def _way_out(self) -> str:
        """How to fix what was written at the end."""
        return (
            f"Restore it from a copy; or remove {self._summary} and {self.path}, and "
            f"write them again: {self._resume()}"
        )
