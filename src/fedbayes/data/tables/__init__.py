"""Tables as features: kinds of columns, cells, encodings, and sums of a client's columns.

What a column is taken for (`kinds.py`) and how it is encoded may improve. Sums of clients
(`sums.py`, `summaries.py`) are files that others send: read older versions, and trust none.
The same column and settings must give the same features at every client.
"""
