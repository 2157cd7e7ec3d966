"""Tables as features: kinds of columns, cells, encodings, and sums of a client's columns."""
