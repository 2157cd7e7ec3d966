"""The application that the commands register with, and how its errors and notes are printed."""

import sys
import warnings
from errno import ENOSPC
from typing import NoReturn, TextIO

import rich
import typer
from rich.markup import escape

from fedbayes.errors import FedbayesError, FedbayesWarning

app = typer.Typer(
    help="Probabilistic federated learning on PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; a user's error becomes one plain message and exit status 2."""
    # So that `package.module:name` finds the user's own module, as with `python -m`.
    if "" not in sys.path:
        sys.path.insert(0, "")
    rich.reconfigure(stderr=True)  # one console for all that is shown while work goes on
    warnings.simplefilter("always", FedbayesWarning)
    warnings.showwarning = _show
    try:
        app()
    except FedbayesError as error:
        fail(str(error))
    except OSError as error:
        if error.filename is None and error.errno != ENOSPC:
            raise
        fail(f"{error.filename or 'the run folder'}: {error.strerror}")


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One plain line of what a user should know; warnings of libraries as Python shows them."""
    if issubclass(category, FedbayesWarning):
        text = f"[yellow]note:[/yellow] {escape(str(message))}"
        rich.get_console().print(text, highlight=False, soft_wrap=True)
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        print(text, end="", file=file or sys.stderr)


def fail(message: str) -> NoReturn:
    """Print a plain message and leave with status 2."""
    text = f"[red]error:[/red] {escape(message)}"
    rich.get_console().print(text, highlight=False, soft_wrap=True)
    sys.exit(2)
