"""Which devices a run uses, decided before JAX starts."""

import jax

from jaxspeed.engine.simulate import simulate
from jaxspeed.errors import ConfigError

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
