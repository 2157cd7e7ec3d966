"""Regression and survival analysis over clients' tables, wherever they are.

`client_tables.py` reads the tables, and `study.py` goes from settings to a result. Add what people
ask of a study here; the statistics are in `biostatistics/`. Tables stay with their clients.
"""
