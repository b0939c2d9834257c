"""The command line, thin over the Python API: one file per command.

Only the file of the command that is called is imported. It imports JAX and what it runs inside of
its functions, after the arguments and the config are read, and rich where it prints: help and
errors in a config are shown within half a second.
"""

from jaxspeed.cli.main import main

__all__ = ["main"]
