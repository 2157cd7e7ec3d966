"""What a run leaves on disk: layout, reader, writer, checkpoints, private states and locks.

Every file is written whole or not at all, and older versions are read. Change a format only with a
test that reads a run of the version before.
"""
