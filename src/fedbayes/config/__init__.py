"""The config of a run: what can be set, its defaults, and what is chosen for a first run.

`config.py` is the table of settings, and `recommended.py` fills in what is left at `auto`. A new
setting is a field here; whoever needs it reads it from the config.
"""
