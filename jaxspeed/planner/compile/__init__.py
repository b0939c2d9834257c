"""Compile a step for devices that are not here, in a child process."""
