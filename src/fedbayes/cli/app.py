"""The application that the commands register with, and how its errors and notes are printed."""

import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from errno import EPIPE
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn, TextIO

import click
import rich
import rich.console
import typer
from rich.console import ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from fedbayes.cli.commands import Application, Commands
from fedbayes.core import portable
from fedbayes.core.files import FULL
from fedbayes.core.here import only_own_modules
from fedbayes.core.portable import NotPortableError
from fedbayes.core.signals import ended_by, interrupt
from fedbayes.errors import FedbayesError, FedbayesWarning, plain
from fedbayes.version import __version__

app = Application(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Probabilistic federated learning on PyTorch."""


class Console(rich.console.Console):
    """A console on which names and contents of files are only shown, whatever they hold."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def print(self, *objects: Any, markup: bool | None = None, **options: Any) -> None:
        """Print tables, or text without interpreting brackets as styles."""
        if markup is None and all(isinstance(one, str) for one in objects):
            markup = False
        super().print(*objects, markup=markup, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The printed pieces, without control characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def main() -> None:
    """Run the command line; a user's error becomes one plain message and exit status 2."""
    only_own_modules(_here())
    if portable.asked() and not portable.started():
        portable.restart()
    if isinstance(sys.stdout, TextIOWrapper):  # as Python has it for stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    # One console for all that is shown while work goes on.
    rich.reconfigure(stderr=True, emoji=False)
    rich.get_console().__class__ = Console
    # Python's own "once" begins anew whenever a library changes a filter.
    warnings.simplefilter("always", FedbayesWarning)
    warnings.showwarning = partial(_show, set())
    try:
        with ended_by(interrupt):
            status = app(standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # at exit it would fail with a traceback
        sys.exit(status)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        message = error.format_message()
        if not message:  # the help was printed
            sys.exit(error.exit_code)
        message = re.sub(r"( Did you mean .+\?)\1", r"\1", message)  # Click and Typer both ask
        context = getattr(error, "ctx", None)
        fail(f"{message} See {context.command_path} --help." if context else message)
    except FedbayesError as error:
        if isinstance(error, NotPortableError):  # nothing is done yet
            portable.restart()
        fail(str(error))
    except (MemoryError, RuntimeError) as error:  # of NumPy, and of PyTorch
        reason = str(error).partition("\n")[0]
        if isinstance(error, RuntimeError) and not re.search(
            "out of memory|allocate memory", reason
        ):
            raise
        fail(
            f"there is not enough memory: {reason}. Use fewer rows (data.limit), smaller batches "
            "(training.batch_size), a smaller network or a larger machine"
        )
    except UnicodeEncodeError as error:
        # What Python has for other bytes, and what of the text around it may be of the name.
        odd = re.search(r"[^\s<>|'\"]*[\udc80-\udcff][^\s<>|'\"]*", error.object)
        if odd is None:
            raise
        fail(f"{odd[0]!r}: its name is not UTF-8. Rename it")
    except OSError as error:
        if error.filename is None and _unwritable():
            if error.errno == EPIPE:  # as Click has it, where whoever read has gone
                sys.exit(1)
            fail(f"cannot write to standard output: {error.strerror}. Redirect it elsewhere")
        if error.filename is None and error.errno not in FULL:
            raise
        fail(f"{error.filename or 'the run folder'}: {error.strerror}")
    finally:
        sys.excepthook = _show_error  # Typer has set its own


def _show_error(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Print an error that nobody expected; one in a user's own code from this code on."""
    installed = (str(Path(__file__).parents[1]), *sysconfig.get_paths().values(), "<frozen")
    own = frames
    while own is not None and own.tb_frame.f_code.co_filename.startswith(installed):
        own = own.tb_next
    traceback.print_exception(kind, error, own or frames)


def _here() -> str:
    """The current directory; empty if it is gone."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _unwritable() -> bool:
    """Whether nothing can be printed; if so, what waits to be is dropped."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _show(
    shown: set[str],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print one plain line for our warning if it is new; others as Python shows them."""
    if issubclass(category, FedbayesWarning):
        if str(message) in shown:
            return
        shown.add(str(message))
        text = f"[yellow]note:[/yellow] {escape(str(message))}"
        rich.get_console().print(text, highlight=False, markup=True, soft_wrap=True)
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        print(plain(text), end="", file=file or sys.stderr)


def fail(message: str) -> NoReturn:
    """Print a plain message and leave with status 2."""
    text = f"[red]error:[/red] {escape(message)}"
    rich.get_console().print(text, highlight=False, markup=True, soft_wrap=True)
    sys.exit(2)
