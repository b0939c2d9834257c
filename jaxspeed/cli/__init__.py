"""The command line, thin over the Python API: one file a command."""

from jaxspeed.cli.main import main

__all__ = ["main"]
