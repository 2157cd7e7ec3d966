"""Inference: the local training loop and the probability that methods are made of."""
