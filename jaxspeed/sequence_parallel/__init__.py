"""Sequences on several devices, and in tiles on one."""
