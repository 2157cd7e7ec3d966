"""What server and clients say to each other: a question, and an answer of sums from each client.

An analysis is a server's function that asks, round by round, through an `Exchange`. Whatever
carries a question to clients and brings their answers back is a `Carrier`: tables in this process
(`fedbayes.biostatistics.client.LocalClients`) or the nodes of a federation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from fedbayes.core.plausible import LARGEST
from fedbayes.errors import MessageError

Array = NDArray[np.float64]
Words = TypeVar("Words", bound=BaseModel)


@dataclass(frozen=True)
class Packet:
    """A question, or the answer to one."""

    told: Mapping[str, Any] = field(default_factory=dict)
    """Words and whole numbers, as JSON has them."""
    numbers: Mapping[str, Array] = field(default_factory=dict)
    """Arrays of float64 by name."""


@dataclass(frozen=True)
class SumsWanted(Packet):
    """A question of which the sum of the answers is wanted, and no single one."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the arrays that a proper answer has, by name; they do not travel."""


class Carrier(Protocol):
    """The way to clients and back."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients, in the order in which their sums are added."""

    def ask(self, question: Packet, most: int) -> dict[str, Packet]:
        """The answers of all clients, by name, in the order of `names`.

        Args:
            question: goes to each of them; `told["ask"]` says what is asked. Where their sum is
                wanted, it may be the only answer, by a name for all of them.
            most: bytes of the longest proper answer.

        Raises:
            FedbayesError: a client cannot answer; the text names it.
        """


class Exchange:
    """Rounds of questions by way of a carrier, and a count of what travelled."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.rounds = 0
        """Questions asked."""
        self.floats = 0
        """Numbers that the client which sent most has sent."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients."""
        return self._carrier.names

    def each(self, ask: str, told: Mapping[str, Any], most: int = 1 << 20) -> dict[str, Packet]:
        """Every client's own answer, by name."""
        return self._ask(Packet({"ask": ask, **told}), most)

    def words(self, ask: str, told: Mapping[str, Any], kind: type[Words]) -> dict[str, Words]:
        """The words of every client's own answer of this kind, by name.

        Raises:
            MessageError: an answer says something else.
        """
        found = {}
        for name, answer in self.each(ask, told).items():
            try:
                found[name] = kind.model_validate(answer.told)
            except ValidationError:
                raise MessageError(f"the answer of client {name} is incomplete: {ask}") from None
        return found

    def sum(
        self,
        ask: str,
        told: Mapping[str, Any],
        numbers: Mapping[str, Array],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        finite: bool = True,
        counts: bool = False,
    ) -> dict[str, Array]:
        """The sum of all clients' answers.

        Args:
            ask: what is asked.
            told: words of the question.
            numbers: arrays of the question.
            shapes: of the arrays that a proper answer has, by name.
            finite: whether a proper answer is finite; at bad coefficients none is.
            counts: whether a proper answer counts rows, so that nothing in it is negative.

        Raises:
            MessageError: an answer is not proper.
        """
        most = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
        question = SumsWanted({"ask": ask, **told}, numbers, shapes)
        answers = self._ask(question, 8 * most + 4096)
        for name, answer in answers.items():
            found = {key: np.shape(array) for key, array in answer.numbers.items()}
            if found != dict(shapes):
                raise MessageError(f"client {name} answered with sums that were not requested")
            arrays = answer.numbers.values()
            if finite and not all((np.abs(array) <= LARGEST).all() for array in arrays):
                raise MessageError(
                    f"client {name} answered with sums that are not finite, or beyond {LARGEST:.1e}"
                )
            if counts and any((array < 0).any() for array in arrays):
                raise MessageError(f"client {name} answered with negative numbers of rows")
        return {key: np.sum([a.numbers[key] for a in answers.values()], axis=0) for key in shapes}

    def _ask(self, question: Packet, most: int) -> dict[str, Packet]:
        answers = self._carrier.ask(question, most)
        self.rounds += 1
        self.floats += max(sum(a.size for a in p.numbers.values()) for p in answers.values())
        return answers
