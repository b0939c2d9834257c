"""All of the package is declared in pyproject.toml; an old Python is refused here.

pip 23 resolves the dependencies as well, and then reports only that there is no such JAX.
"""

import sys

from setuptools import setup

if sys.version_info < (3, 12):  # noqa: UP036 (what this file is for)
    sys.exit(
        "jaxspeed needs Python 3.12 or newer, as JAX 0.11.2 does; this is "
        f"{sys.version.split()[0]}. `make install` creates a venv with one that it finds."
    )
setup()
