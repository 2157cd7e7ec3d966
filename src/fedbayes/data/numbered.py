"""Names of clients that have none of their own."""

from collections.abc import Iterator, Sequence
from typing import Any, overload


class Numbered(Sequence[str]):
    """The names of clients that are numbered, `client-0` and on, each made when it is asked for."""

    def __init__(self, clients: int) -> None:
        self._clients = clients

    def __len__(self) -> int:
        return self._clients

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...

    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            if place.start is None and place.step is None:
                return Numbered(range(self._clients)[place].stop)
            return [f"client-{number}" for number in range(self._clients)[place]]
        return f"client-{range(self._clients)[place]}"

    def __iter__(self) -> Iterator[str]:
        return (f"client-{number}" for number in range(self._clients))

    def __contains__(self, name: object) -> bool:
        return self._number(name) is not None

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The number of the client of this name."""
        number = self._number(value)
        if number is None or number not in range(self._clients)[start:stop]:
            raise ValueError(f"{value!r} is not one of the clients")
        return number

    def _number(self, name: object) -> int | None:
        word = name.removeprefix("client-") if isinstance(name, str) else ""
        if not word.isdecimal() or name != f"client-{int(word)}" or int(word) >= self._clients:
            return None
        return int(word)
