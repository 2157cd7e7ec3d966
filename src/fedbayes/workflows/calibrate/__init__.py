"""Calibration with clients: they answer with sums, the server finds a temperature, a threshold or a
baseline hazard, and predictions apply it.
"""
