"""The command line. No logic: every command calls the package and prints.

Imports that take long are made inside the commands, so that help is instant. Each file registers
its commands with `app` when it is imported; they are listed in this order.

A new command is a function in the file of its kind. Names of commands and options must stay; what
they do belongs to `workflows/`, where Python finds it too.
"""

from fedbayes.cli import (  # noqa: F401, I001
    run,
    forget,
    contributions,
    compare,
    tune,
    attack,
    files,
    predict,
    calibrate,
    fuse,
    posterior,
    reports,
    federate,
    nodes,
    biostatistics,
    data,
    listing,
    doctor,
)
from fedbayes.cli.app import app, main

__all__ = ["app", "main"]
