"""State on a disk: scratch folders, direct I/O, and arrays of a train state that are in files."""
