"""From files to files: what users do with models, runs and tables, one folder for each task.

The commands of the command line and the functions of `fedbayes` call these; mathematics is below,
in `fusion/`, `likelihoods/` and `biostatistics/`. Put a new task into the folder of the people who
do it. Files that one version writes, the next one reads.
"""
