"""Simulated time: how long clients take, and when they are there."""
