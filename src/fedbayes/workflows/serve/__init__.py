"""Trained models at work: predictions, evaluation, export and model cards."""
