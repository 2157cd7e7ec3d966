"""What runs tell: gathered from their folders, drawn as single figures or on one page.

`gather` reads the folders, `figures` decides what is shown, in `charts`, which are plain data;
`draw` makes a figure of a chart for a paper, `page` a page of all of them.

Charts, words and styles may change freely; colours come from `palette.py` alone. Nothing here
writes into a run folder or imports a module that one names: folders may be a stranger's.
"""

from fedbayes.reports.draw import plot
from fedbayes.reports.gather import Record, gather
from fedbayes.reports.page import write_page

__all__ = ["Record", "gather", "plot", "write_page"]
