"""Many runs: seeds, methods, configs and attacks side by side, and tables that compare them.

A grid is a folder of run folders, whose layout each file describes. Tables and figures may change
freely. A run that has ended is never run again, and a call with more seeds or methods adds to what
is there.
"""
