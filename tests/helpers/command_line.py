"""The command line as tests call it: in this process, or in one of its own."""

import subprocess
import sys
from contextlib import contextmanager

import pytest

from fedbayes.cli import main
from fedbayes.core import here


@contextmanager
def path_restored():
    """The command line takes its folder off the path of its process, and sets what shows errors:
    tests share one process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(here._finder, "folder", here._finder.folder)
        yield patch


def command(*arguments):
    """Run the command line in this process; its exit status."""
    with path_restored() as patch:
        patch.setattr("sys.argv", ["fedbayes", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code or 0


def cli(capsys, *arguments):
    """Run it in this process: its exit status and what it printed."""
    return command(*arguments), *capsys.readouterr()


def process(*arguments):
    """What starts the command line as a process."""
    return [sys.executable, "-m", "fedbayes.cli", *map(str, arguments)]


def fedbayes_cli(*arguments, check=0):
    """Run it as a process to its end, with this exit status and no traceback."""
    done = subprocess.run(
        process(*arguments), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return done
