"""Tensors, messages, files, random numbers and words that every other folder uses.

Nothing here knows what a round or a method is. A change here reaches everything, so add only what
two folders need. The bytes of `messages.py` and `coding.py` and the streams of `seeds.py` must stay
as they are: runs, model files and reference models depend on them.
"""
