"""What a run leaves on disk: layout, reader, writer, checkpoints, private states and locks.

Every file is written whole or not at all, and older versions are read. Change a format only with a
test that reads a run of the version before.

A round is complete when its checkpoint has been renamed into place. The checkpoint and all that it
names reach the disk during the next round, and what it replaces is removed after that; a resume
removes what an unfinished round left. What is read is compared with the digests that were written,
and a file that differs is rejected by name. Who only reads a folder never imports a module that it
names. `tests/hostile/folders.py` damages folders, and `tests/hostile/kills.py` kills runs.
"""
