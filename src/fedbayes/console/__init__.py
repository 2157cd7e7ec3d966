"""What a run prints while it goes, in a terminal and in a notebook.

Words, columns and colours may change freely. Nothing here computes or writes: it shows lines that a
run has recorded. It imports no PyTorch, so that a command shows something at once.
"""
