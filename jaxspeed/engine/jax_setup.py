"""Settings before JAX starts: a run's devices, simulated ones, their memory, compiled programs."""

import ctypes
import os
from pathlib import Path

import jax
from jax._src import distributed, xla_bridge

from jaxspeed.config import Config
from jaxspeed.errors import ConfigError, JaxspeedError
from jaxspeed.launch.environment import start_processes

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}


def start_devices(word: str | None) -> None:
    """Start JAX on a platform (`gpu`) or on simulated devices (`cpu:8`); None: JAX's default.

    If there are other processes, they are joined first, and share the simulated devices.

    Raises:
      ConfigError: there are no such devices.
      JaxspeedError: JAX has already started with other devices.
    """
    join_processes(word)
    if word is None:
        return
    platform, _, count = word.partition(":")
    if count:
        simulate(int(count))
        return
    jax.config.update("jax_platforms", PLATFORMS[platform])
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a message, in 0.10.2
        reason = (str(error).strip() or "no such devices").splitlines()[0]
        raise ConfigError(f"run.devices: {word}, which JAX cannot start: {reason}") from None
    if found[0].platform not in (platform, "gpu" if platform == "cuda" else platform):
        raise ConfigError(
            f"run.devices: {word}, but JAX has already started on {found[0].platform}"
        )


def join_processes(word: str | None, seconds: float | None = None) -> None:
    """Join the run's other processes, if there are any; the devices start later."""
    if (word or "").startswith("cpu") and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")  # what JAX detects of TPU pods does not count
    start_processes(seconds)


# -- simulated devices on one CPU -----------------------------------------------------------------


def simulate(devices: int) -> None:
    """Start JAX with this many simulated CPU devices. Call it before any other use of JAX.

    With several processes it is the number of all of them together.

    Raises:
      JaxspeedError: JAX has already started with other devices, which cannot be changed.
    """
    if devices < 1:
        raise JaxspeedError(f"simulate({devices}): at least one device is needed")
    processes = distributed.global_state.num_processes
    if devices % processes:
        raise JaxspeedError(
            f"simulate({devices}): not divisible by the {processes} processes of this run"
        )
    keep_freed_memory()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices // processes)
    except RuntimeError:
        pass  # already started; checked below
    found = jax.devices()
    if len(found) != devices or found[0].platform != "cpu":
        raise JaxspeedError(
            f"simulate({devices}): JAX has already started with {len(found)} {found[0].platform} "
            "devices; call simulate first, before creating any array"
        )


# Parameters of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MOST_KEPT = 2**31 - 1  # bytes, of one free block; the largest that mallopt takes


def keep_freed_memory() -> None:
    """Let glibc keep what a step on CPU devices frees, for the next step.

    XLA:CPU allocates the temporary arrays of a step anew each time, as one block. By default glibc
    has the kernel map and unmap a block of this size, and the kernel clears its pages one by one as
    they are written: a fifth of the time of a small GPT-2's step. So blocks come from one heap,
    which keeps up to `MOST_KEPT` bytes at its end: no more than the process had at its peak, but
    until it ends. It has an effect on threads that have not allocated memory yet, so call it
    before the first computation. Settings of the environment (MALLOC_*, GLIBC_TUNABLES) are left
    as they are, and other C libraries too.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(M_ARENA_MAX, 1)  # other heaps hold no block of over 64 MiB
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, MOST_KEPT)


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
