"""The only sharding constraint of the library (`with_sharding_constraint`), with a named site.

Tests drop one site at a time and expect a check to fail.
"""

import jax
from jax.sharding import Sharding


def constrain[Array](x: Array, sharding: Sharding, site: str) -> Array:
    """Constrain the sharding of `x` in a traced program; `site` names the decision."""
    del site
    return jax.lax.with_sharding_constraint(x, sharding)
