"""Model files in, one model file out: which method fuses them, its settings, and its report.

A new way to fuse gets its name in `fusion_method.py`, and its mathematics goes into `fusion/`.
Models come from strangers: they are read with bounds, and no code of theirs runs. Options of
`fedbayes fuse` that have no effect on a method must raise an error.
"""
