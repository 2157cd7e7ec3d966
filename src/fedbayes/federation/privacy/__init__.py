"""Central differential privacy: what a client's change may be, what noise goes on the sum of a
round, who is in it, and what all rounds together spend.

Faster noise and tighter accounting are welcome, with a proof or a reference in the docstring.
`accounting.py` must never report less than was spent, so tests compare it with closed forms.
Secrets (`keys.py`) never go into a run folder, and a private round measures no report by others.
"""
