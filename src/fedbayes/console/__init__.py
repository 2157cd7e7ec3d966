"""What a run prints while it goes, in a terminal and in a notebook.

Nothing here computes: it shows lines that a run has recorded.
"""
