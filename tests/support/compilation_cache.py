"""Where compiled programs of the tests are kept: outside of checkouts, one folder for a jaxlib."""

import os
import sys
from importlib.metadata import version
from pathlib import Path


def folder() -> Path:
    """Shared by all checkouts: JAX's key of a program has its text, its options and its flags."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return caches / "jaxspeed-tests" / f"jaxlib-{version('jaxlib')}-{python}"
