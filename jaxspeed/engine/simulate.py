"""Many devices on one CPU, for trying a mesh before there is one."""

import jax

from jaxspeed.errors import JaxspeedError


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
