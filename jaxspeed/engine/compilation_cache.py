"""The persistent compilation cache: a program that was compiled once starts at once next time."""

import os
from pathlib import Path

import jax

from jaxspeed.config import Config


def enable_compilation_cache(config: Config) -> None:
    """Turn on JAX's cache as `run.compilation_cache` says; one that is set already is kept."""
    wanted = config.run.compilation_cache
    if wanted is False or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    folder = _user_cache() if wanted is True else Path(wanted).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxspeed" / "xla"
