"""Known bugs of JAX and XLA: the versions that are refused, and programs that show the bugs."""

from jaxspeed.known_jax_bugs.table import (
    FLOOR,
    KNOWN_BUGS,
    KnownBug,
    installed,
    refuse_known_bugs,
    refuse_old_jax,
)

__all__ = [
    "FLOOR",
    "KNOWN_BUGS",
    "KnownBug",
    "installed",
    "refuse_known_bugs",
    "refuse_old_jax",
]
