"""Compile a step for absent devices, in a child process."""
