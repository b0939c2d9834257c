"""The command line, thin over the Python API: one file per command."""

from jaxspeed.cli.main import main

__all__ = ["main"]
