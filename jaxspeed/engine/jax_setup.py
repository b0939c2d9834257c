"""JAX's settings before it starts: the devices of a run, simulated ones, the compilation cache."""

import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import jax
from jax._src import distributed, hardware_utils, xla_bridge

from jaxspeed.errors import ConfigError, JaxspeedError
from jaxspeed.launch.environment import late_devices, start_processes

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
        devices = jax.devices()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # the latter, without a message, in 0.11.2 and 0.12.0.1
        if late_devices(error):
            raise  # the config is right, and the watchdog names the process
        reason = (str(error).strip() or "no such devices").splitlines()[0]
        raise ConfigError(f"run.devices: {word}, which JAX cannot start: {reason}") from None
    if devices[0].platform not in (platform, "gpu" if platform == "cuda" else platform):
        raise ConfigError(
            f"run.devices: {word}, but JAX has already started on {devices[0].platform}"
        )


def join_processes(word: str | None, seconds: float | None = None) -> None:
    """Join the run's other processes, if there are any; the devices start later."""
    if (word or "").startswith("cpu") and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")  # what JAX detects of TPU pods does not count
    leave_out_libtpu()
    start_processes(seconds)


def leave_out_libtpu() -> None:
    """Start JAX without libtpu where it is the only plugin and no TPU is attached.

    The extra `tpu` is also for plans. JAX (0.12) starts libtpu wherever it is installed, and that
    writes lines on what it misses to the process's stderr.
    """
    is_chosen = jax.config.jax_platforms or "JAX_FORCE_TPU_INIT" in os.environ
    if is_chosen or xla_bridge.backends_are_initialized() or not find_spec("libtpu"):
        return
    has_plugins = find_spec("jax_plugins") or entry_points(group="jax_plugins")
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    if not chips and not has_plugins:
        jax.config.update("jax_platforms", "cpu")


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
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices // processes)
    except RuntimeError:
        pass  # already started; checked below
    jax_devices = jax.devices()
    if len(jax_devices) != devices or jax_devices[0].platform != "cpu":
        raise JaxspeedError(
            f"simulate({devices}): JAX has already started with {len(jax_devices)} "
            f"{jax_devices[0].platform} devices; call simulate first, before creating any array. "
            "A module that a config names creates its arrays in functions"
        )


# -- the persistent compilation cache: a program that was compiled once starts at once next time ---


def enable_compilation_cache(wanted: bool | str) -> None:
    """Turn on JAX's cache as `run.compilation_cache` says; one that is set already is kept."""
    if wanted is False or jax.config.jax_compilation_cache_dir:
        return
    folder = _user_cache() if wanted is True else Path(wanted).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:
        # JAX's default would leave out most programs of evaluation, text and initialization.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxspeed" / "xla"
