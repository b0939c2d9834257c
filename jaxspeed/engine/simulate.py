"""Many devices on one CPU, for trying a mesh before there is one."""

import logging
import os

import jax
import numpy as np

from jaxspeed.errors import JaxspeedError

log = logging.getLogger("jaxspeed")

# A device that waits in a collective holds a thread of XLA's CPU client (jax 0.10.2), which has as
# many as there are cores or devices. Independent collectives of one step wait at once, and where
# all threads wait for a device that has none the process hangs: a pipeline's messages beside its
# gathers.
THREADS_A_DEVICE = 8


def warn_of_few_threads(devices: np.ndarray) -> None:
    """Tell what to do where simulated devices were started without threads enough."""
    needed = THREADS_A_DEVICE * devices.size
    given = os.environ.get("NPROC", "0")
    if devices.flat[0].platform != "cpu" or (given.isdigit() and int(given) >= needed // 2):
        return
    log.warning(
        "%d simulated devices share too few threads for the collectives of a pipeline, and may "
        "wait for each other for ever: start them by jaxspeed.simulate(%d), or with NPROC=%d in "
        "the environment",
        devices.size,
        devices.size,
        needed,
    )


def simulate(devices: int) -> None:
    """Let JAX run on this many simulated CPU devices. Call it before anything else uses JAX.

    Raises:
      JaxspeedError: JAX has started already with other devices, which cannot be changed.
    """
    if devices < 1:
        raise JaxspeedError(f"simulate({devices}): at least one device is needed")
    os.environ.setdefault("NPROC", str(THREADS_A_DEVICE * devices))  # read when the client starts
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
