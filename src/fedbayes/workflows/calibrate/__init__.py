"""Calibration with clients: they answer with sums, the server finds a temperature, a threshold or a
baseline hazard, and predictions apply it.

The formulas are in `likelihoods/`; here are the rows that clients hold out and the files that come
of it. A client may send sums and counts, never rows. Rows by which a model was calibrated must not
score it.
"""
