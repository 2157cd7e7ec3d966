"""From files to files: what users do with models, runs and tables, one folder for each task.

The commands of the command line and the functions of `fedbayes` call these; mathematics is below,
in `fusion/`, `likelihoods/` and `biostatistics/`.
"""
