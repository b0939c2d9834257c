"""The one door through which the library says to the compiler where an array lives.

Every constraint has a name (its site), so that tests can drop one at a time and see a check fail.
"""

from typing import TypeVar

import jax
from jax.sharding import Sharding

Array = TypeVar("Array")


def constrain(x: Array, sharding: Sharding, site: str) -> Array:
    """Pin `x`, inside a traced program, to a sharding; `site` says which decision this is."""
    del site
    return jax.lax.with_sharding_constraint(x, sharding)
