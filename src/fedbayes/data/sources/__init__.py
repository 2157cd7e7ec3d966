"""Readers of the formats in which data sets come, a file each.

A reader turns files, a query or a function into the arrays of one `Dataset`. Add a format freely.
Files may be damaged or a stranger's: bound what is read, and name the file and the row in errors.
"""
