"""Tensors, messages, files and words that every other folder uses.

Nothing here knows what a round or a method is. A change here reaches everything: keep it small.
"""
