"""Rows that a SQL query gives, through SQLAlchemy."""

import os
from typing import Any

from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.files import reading
from fedbayes.errors import DataError

DATABASE = "FEDBAYES_DATABASE"
"""Environment variable with the URL of the database, where the settings name none."""
PASSWORD = "FEDBAYES_DATABASE_PASSWORD"
"""Environment variable with its password, which no setting holds."""
WHERE = "the query"
"""What messages call the rows."""


def read_query(settings: SourceSettings) -> Any:
    """The rows of a query as a frame, in an order of their own: the same rows are the same data.

    The query runs in a transaction that is rolled back.

    Raises:
        DataError: SQLAlchemy or a driver is not installed, the database cannot be reached, or the
            query fails; no message holds a password.
    """
    try:
        import sqlalchemy
    except ImportError:
        raise DataError(
            "SQL queries need SQLAlchemy: pip install 'fedbayes[sql]', and a driver of the database"
        ) from None
    import pandas as pd

    url = _url(settings.database)
    shown = url.render_as_string(hide_password=True)
    try:
        engine = sqlalchemy.create_engine(url)
        with engine.connect() as connection:
            frame = pd.read_sql_query(sqlalchemy.text(settings.query or ""), connection)
    except ModuleNotFoundError as error:
        raise DataError(f"{shown} needs the driver {error.name}; install it with pip") from None
    except (sqlalchemy.exc.SQLAlchemyError, pd.errors.DatabaseError) as error:
        cause = error.__cause__ if isinstance(error, pd.errors.DatabaseError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).strip().splitlines()
        raise DataError(
            f"the query to {shown} failed: {_hidden(reason[0] if reason else 'no reason', url)}; "
            f"mend data.query, data.database or {PASSWORD}"
        ) from None
    frame.columns = pd.Index([str(column).strip() for column in frame.columns])
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"{WHERE} gives two columns '{twice}'; name one of them with AS")
    if frame.empty:
        raise DataError(f"{WHERE} to {shown} gives no rows")
    with reading(WHERE):
        order = frame.astype(str).sort_values(list(frame.columns), kind="stable").index
        return frame.loc[order].reset_index(drop=True)


def _url(named: str | None) -> Any:
    import sqlalchemy

    text = named or os.environ.get(DATABASE)
    if not text:
        raise DataError(
            f"data.query needs a database: give its URL in data.database or {DATABASE}, as in "
            "postgresql+psycopg://user@host/name or sqlite:////path/to/file.db"
        )
    try:
        url = sqlalchemy.make_url(text)
    except sqlalchemy.exc.ArgumentError:
        place = "data.database" if named else DATABASE
        raise DataError(
            f"{place} is no URL of a database; write it as postgresql+psycopg://user@host/name or "
            "sqlite:////path/to/file.db"
        ) from None
    if url.drivername.startswith("sqlite") and url.database and not os.path.isfile(url.database):  # noqa: PTH113
        raise DataError(f"there is no file {url.database}; mend data.database")
    if url.drivername.startswith("sqlite"):  # a file, which has none
        return url
    password = os.environ.get(PASSWORD)
    return url.set(password=password) if password and not url.password else url


def _hidden(text: str, url: Any) -> str:
    """A driver's words without the password, should they hold it."""
    for secret in filter(None, [url.password, *url.query.values()]):
        text = text.replace(str(secret), "***")
    return text
