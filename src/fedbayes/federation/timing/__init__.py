"""Simulated time: how long clients take, who is there, and rounds that wait for nobody."""
