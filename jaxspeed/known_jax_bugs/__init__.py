"""Known bugs of JAX and XLA: the versions that are refused, and programs that show the bugs."""

from jaxspeed.known_jax_bugs.table import KNOWN_BUGS, installed, refuse_known_bugs, refuse_old_jax

__all__ = [
    "KNOWN_BUGS",
    "installed",
    "refuse_known_bugs",
    "refuse_old_jax",
]
