"""Central differential privacy: what a client's change may be, what noise goes on the sum of a
round, who is in it, and what all rounds together spend.
"""
