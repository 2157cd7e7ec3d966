"""Readers of the formats in which data sets come."""
