"""Inference: the local training loop and the probability that methods are made of.

`problem.py` states a client's work as data, and `solve.py` has the only training loop. Optimizers,
schedules and distributions may be added, a file each. Do not add a second loop, and keep losses
pure: they read tensors from their arguments alone.
"""
