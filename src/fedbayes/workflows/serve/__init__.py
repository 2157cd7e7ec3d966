"""Trained models at work: predictions, evaluation, export and model cards.

New formats of export and new kinds of rows are welcome. A model file carries its preprocessing, so
raw rows go in and names of classes come out: keep both in step. Files of rows may be larger than
memory, so they are read piece by piece.
"""
