"""Input priors: what inputs look like where there are no data.

A server that holds networks and no data knows what kind of inputs they take: photographs, pen
strokes, rows of a table. A prior draws such inputs, as many as are asked for.
"""
