"""What is asked of JAX before it starts: its devices, and the compilation cache."""

import os
from pathlib import Path

import jax

from jaxspeed.config import Config
from jaxspeed.errors import ConfigError, JaxspeedError

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}


def start_devices(word: str | None) -> None:
    """Start JAX on a platform (`gpu`), or on simulated devices (`cpu:8`); None: on what it finds.

    Raises:
      ConfigError: there are none such.
      JaxspeedError: JAX has started already with other devices.
    """
    if word is None:
        return
    platform, _, count = word.partition(":")
    if count:
        simulate(int(count))
        return
    jax.config.update("jax_platforms", PLATFORMS[platform])
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, with nothing said, in 0.10.2
        reason = (str(error).strip() or "it finds none").splitlines()[0]
        raise ConfigError(f"run.devices: {word}, which JAX cannot start: {reason}") from None
    if found[0].platform not in (platform, "gpu" if platform == "cuda" else platform):
        raise ConfigError(
            f"run.devices: {word}, but JAX has already started on {found[0].platform}"
        )


# -- many devices on one CPU, for trying a mesh before there is one -------------------------------


def simulate(devices: int) -> None:
    """Let JAX run on this many simulated CPU devices. Call it before anything else uses JAX.

    Raises:
      JaxspeedError: JAX has started already with other devices, which cannot be changed.
    """
    if devices < 1:
        raise JaxspeedError(f"simulate({devices}): at least one device is needed")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        pass  # started already; what counts is with what
    found = jax.devices()
    if len(found) != devices or found[0].platform != "cpu":
        raise JaxspeedError(
            f"simulate({devices}): JAX has already started with {len(found)} {found[0].platform} "
            "devices; call simulate first, before any array is made"
        )


# -- the persistent compilation cache: a program that was compiled once starts at once next time ---


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
