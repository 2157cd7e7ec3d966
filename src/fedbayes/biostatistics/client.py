"""A client's side: its table, and its answers to what it may be asked."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedbayes.biostatistics.columns import Coding, Wanted, describe, tell_names
from fedbayes.biostatistics.design import Design, design, tell_moments
from fedbayes.biostatistics.exchange import Exchange, Packet
from fedbayes.biostatistics.generalized import fit_glm, tell_fit, tell_fit_scores
from fedbayes.biostatistics.hazards import fit_cox
from fedbayes.biostatistics.risk_sets import (
    tell_counts,
    tell_event_times,
    tell_influence,
    tell_own_likelihood,
    tell_own_scores,
    tell_risk_sets,
    tell_scores,
)
from fedbayes.core.categories import normal, without_blanks
from fedbayes.errors import (
    ColumnError,
    DataError,
    EngineError,
    FedbayesError,
    MessageError,
    told_as,
)

if TYPE_CHECKING:
    import pandas as pd


class TableClient:
    """The rows of one client, which it summarizes as sums.

    Args:
        frame: its table.
        least: fewest rows, in all and of a category, of which it says anything, whatever is asked.
    """

    def __init__(self, frame: "pd.DataFrame", least: int = 0) -> None:
        frame = frame.rename(columns=normal)
        if len(twice := frame.columns[frame.columns.duplicated()]):
            raise DataError(f"a client's table has two columns '{twice[0]}'. Rename one of them")
        # As in tables for networks, a blank cell is an empty one, and no category.
        self._frame, self._least = frame.apply(without_blanks), least
        self._coded: tuple[Coding, Design] | None = None

    def answer(self, question: Packet) -> Packet:
        """Its answer to a question.

        Raises:
            MessageError: it is no question.
            FedbayesError: its rows cannot be coded, or are too few.
        """
        with told_as(MessageError, "unknown question", KeyError, TypeError, ValidationError):
            handler = _ANSWERS[question.told["ask"]]
            return handler(self, question.told, dict(question.numbers))

    def wanted(self, told: Mapping[str, Any]) -> Wanted:
        """The columns that a question is of, with this client's own least number of rows."""
        wanted = Wanted.model_validate(told)
        return wanted.model_copy(update={"least": max(wanted.least, self._least)})

    def rows(self, told: Mapping[str, Any]) -> Design:
        """Its rows, coded for a question; they are coded once.

        Raises:
            EngineError: they are fewer than it speaks of.
        """
        coding = Coding.model_validate(told["coding"])
        if self._coded is None or self._coded[0] != coding:
            if self._least:
                describe(self._frame, self.wanted(coding.wanted.model_dump()))
            self._coded = (coding, design(self._frame, coding))
        return self._coded[1]

    def describe(self, told: Mapping[str, Any]) -> Packet:
        """What its columns are."""
        wanted = self.wanted(told["wanted"])
        lacking = [column for column in wanted.used if column not in self._frame.columns]
        if lacking:
            raise EngineError(f"it has no column '{lacking[0]}'")
        return describe(self._frame, wanted)

    def fit(self, told: Mapping[str, Any]) -> Packet:
        """A regression of only its own rows, or the reason why there is none."""
        wanted = self.wanted(told["wanted"])
        exchange = Exchange(LocalClients({"its own": self}))
        try:
            if told["family"] == "cox":
                found = fit_cox(exchange, wanted, told["ties"])
            else:
                found = fit_glm(exchange, wanted, told["family"])
        except DataError as error:
            return Packet({"none": str(error).removeprefix("client its own: ")})
        told = {"names": list(found.names), "rows": found.rows["its own"]}
        return Packet(told, {"estimates": found.estimates, "std_errors": found.std_errors})

    @property
    def names(self) -> Packet:
        """The names of its columns."""
        return tell_names(self._frame)


_ANSWERS: dict[str, Callable[[TableClient, Mapping[str, Any], dict[str, Any]], Packet]] = {
    "names": lambda client, told, numbers: client.names,
    "columns": lambda client, told, numbers: client.describe(told),
    "moments": lambda client, told, numbers: tell_moments(
        client.rows(told), numbers["center"], told["coding"]["wanted"]["counts"]
    ),
    "glm": lambda client, told, numbers: tell_fit(client.rows(told), told["family"], numbers),
    "glm_scores": lambda client, told, numbers: tell_fit_scores(
        client.rows(told), told["family"], numbers
    ),
    "event_times": lambda client, told, numbers: tell_event_times(
        client.rows(told), told["groups"]
    ),
    "counts": lambda client, told, numbers: tell_counts(
        client.rows(told), numbers["times"], numbers["groups"], rows=bool(told.get("rows"))
    ),
    "risk_sets": lambda client, told, numbers: tell_risk_sets(client.rows(told), numbers),
    "own_likelihood": lambda client, told, numbers: tell_own_likelihood(
        client.rows(told), numbers, told["ties"]
    ),
    "scores": lambda client, told, numbers: tell_scores(client.rows(told), numbers),
    "own_scores": lambda client, told, numbers: tell_own_scores(
        client.rows(told), numbers, told["ties"]
    ),
    "influence": lambda client, told, numbers: tell_influence(client.rows(told), numbers),
    "fit": lambda client, told, numbers: client.fit(told),
}
"""What a client may be asked, and how it answers."""
SUMS = (
    *("moments", "glm", "glm_scores", "counts", "risk_sets", "own_likelihood"),
    *("scores", "own_scores", "influence"),
)
"""What is answered with sums that add over clients."""
OPEN = ("names", "columns", "event_times")
"""What is answered one by one under secure aggregation too."""


def groupings(question: Packet) -> tuple[str, ...]:
    """Columns that divide rows in the analysis that a question is of, and so are text,
    whatever they look like; none if it is of no analysis.
    """
    told = question.told
    try:
        wanted = told["wanted"] if "wanted" in told else told["coding"]["wanted"]
        return Wanted.model_validate(wanted).groupings
    except (KeyError, TypeError, ValidationError):
        return ()


class LocalClients:
    """Clients whose tables are in this process.

    Args:
        clients: by name, in the order in which their sums are added.
    """

    def __init__(self, clients: Mapping[str, TableClient]) -> None:
        if not clients:
            raise DataError("there are no clients. Give the table of each client")
        self._clients = dict(clients)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients."""
        return tuple(self._clients)

    def ask(self, question: Packet, most: int) -> dict[str, Packet]:
        """The answers of all clients, by name.

        Raises:
            DataError: a client cannot answer; the text names it.
        """
        answers = {}
        for name, client in self._clients.items():
            try:
                answers[name] = client.answer(question)
            except ColumnError:
                raise
            except FedbayesError as error:
                raise DataError(f"client {name}: {error}") from None
        return answers
