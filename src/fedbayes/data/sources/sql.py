"""Rows that a SQL query gives, through SQLAlchemy."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedbayes.core.categories import normal
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.files import reading
from fedbayes.data.sources.tables import without
from fedbayes.errors import DataError

DATABASE = "FEDBAYES_DATABASE"
"""Environment variable with the URL of the database, where the settings name none."""
PASSWORD = "FEDBAYES_DATABASE_PASSWORD"
"""Environment variable with its password, which no setting holds."""
WHERE = "the query"
"""What messages call the rows."""


def read_query(settings: SourceSettings) -> Any:
    """The rows of a query as a sorted frame, so that the same rows are the same data.

    The query runs in a transaction that is rolled back.

    Raises:
        DataError: SQLAlchemy or a driver is not installed, the database cannot be reached, or the
            query fails; no message holds a password.
    """
    with connected(settings.database) as (connection, query):
        import pandas as pd

        frame = pd.read_sql_query(query(settings.query or ""), connection)
        shown = connection.engine.url.render_as_string(hide_password=True)
    frame.columns = pd.Index(column_names(frame.columns))
    if frame.empty:
        raise DataError(f"{WHERE} to {shown} returns no rows")
    frame = without(frame, settings.na_values)
    with reading(WHERE):
        order = frame.astype(str).sort_values(list(frame.columns), kind="stable").index
        return frame.loc[order].reset_index(drop=True)


@contextmanager
def connected(
    named: str | None, place: str = "data.database", asked: str = "data.query"
) -> Iterator[tuple[Any, Any]]:
    """A connection to a database whose transaction is rolled back, and what makes queries of texts.

    Args:
        named: its URL; None for that of the environment.
        place: where the URL is from, for messages.
        asked: where the query is from.

    Raises:
        DataError: as for `read_query`, also of what goes wrong in the block.
    """
    try:
        import sqlalchemy
    except ImportError:
        raise DataError(
            "SQL queries need SQLAlchemy: pip install 'fedbayes[sql]', and a driver of the database"
        ) from None
    import pandas as pd

    url = _url(named, place, asked)
    shown = url.render_as_string(hide_password=True)
    try:
        engine = sqlalchemy.create_engine(url)
        with engine.connect() as connection:
            yield connection, sqlalchemy.text
    except ModuleNotFoundError as error:
        raise DataError(f"{shown} needs the driver {error.name}. Install it with pip") from None
    except (sqlalchemy.exc.SQLAlchemyError, pd.errors.DatabaseError) as error:
        cause = error.__cause__ if isinstance(error, pd.errors.DatabaseError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).strip().splitlines()
        raise DataError(
            f"the query to {shown} failed: {_hidden(reason[0] if reason else 'no reason', url)}. "
            f"Correct {asked}, {place} or {PASSWORD}"
        ) from None


def column_names(columns: Any) -> list[str]:
    """The names of a query's columns, without blanks around them.

    Raises:
        DataError: two are the same.
    """
    names = [normal(column).strip() for column in columns]
    twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
    if twice is not None:
        raise DataError(f"{WHERE} returns two columns '{twice}'. Rename one of them with AS")
    return names


def _url(named: str | None, where: str, asked: str) -> Any:
    import sqlalchemy

    text = named or os.environ.get(DATABASE)
    if not text:
        raise DataError(
            f"{asked} needs a database: give its URL in {where} or {DATABASE}, as in "
            "postgresql+psycopg://user@host/name or sqlite:////path/to/file.db"
        )
    place = where if named else DATABASE
    try:
        url = sqlalchemy.make_url(text)
    except sqlalchemy.exc.ArgumentError:
        raise DataError(
            f"{place} is not the URL of a database. Write it as "
            "postgresql+psycopg://user@host/name or sqlite:////path/to/file.db"
        ) from None
    if url.drivername.startswith("sqlite") and url.database and not os.path.isfile(url.database):  # noqa: PTH113
        raise DataError(f"file not found: {url.database}. Correct {place}")
    if url.drivername.startswith("sqlite"):  # a file, which has none
        return url
    password = os.environ.get(PASSWORD)
    return url.set(password=password) if password and not url.password else url


def _hidden(text: str, url: Any) -> str:
    """A driver's words without the password, should they hold it."""
    for secret in filter(None, [url.password, *url.query.values()]):
        text = text.replace(str(secret), "***")
    return text
