"""Compile a step for absent devices, in a child process."""

PATIENCE = 1800.0  # seconds; ten times the longest compile that was measured
PRINTED = "printed"  # XLA's dump folder, in a compile's folder
EXECUTABLE = "executable"  # the executable's file there
