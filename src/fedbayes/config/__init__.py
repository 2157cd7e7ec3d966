"""The config of a run: what can be set, its defaults, and what is chosen for a first run.

`config.py` is the table of settings, and `recommended.py` fills in what is left at `auto`. A new
setting is a field, here or in the `settings.py` of the folder that it configures; whoever needs it
reads it from the config. Do not rename a setting or change a default without a line in the
changelog, and read the configs of the version before.

These files import no PyTorch, nor does any `settings.py`, nor does a package until something is
asked of it. So help, completion and the errors of a wrong config come at once.
"""
