"""Running a federation: the round, the clients' side of it, and the engines that carry it out.

Nothing here knows a method by its name.
"""
