"""Runs: from a config to a run folder."""
