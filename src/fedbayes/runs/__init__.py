"""Runs: from a config to a run folder.

`build.py` makes the things that a config names, `checks.py` rejects what cannot run before the
first round, and `Simulation` (`simulation.py`) runs the rounds and records each. A new metric of a
round goes into `lines.py`, a new check into `checks.py`. The rest of the package must be able to
resume any run: what a round needs is in its checkpoint, and nothing else is remembered.
"""
