"""Running a federation: the round, the clients' side of it, and the engines that carry it out.

`round.py` runs one round of any method on any engine. A feature of a round is a file in `stages/`,
an engine a file in `engines/` and a row of `engine_table.py`. Nothing here knows a method by its
name: what may be done to reports follows from their declaration (`contracts/parts.py`). The order
in which reports are folded is part of the numbers.

Between server and client there is nothing but bytes, whose lengths are `bytes_down` and `bytes_up`.
A client's private state passes between the engine and its store and is not counted: in a real
federation it stays where it is.
"""
