"""How a parameter is shared among the servers: cut along one dim, padded so that it can be.

The servers' table says where. A worker cuts what it pushes and joins what it pulled in the same
places, so that no server is ever sent what it does not own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.objective.train_state import pad, unpad
from jaxspeed.placement.specs import sharded_dim
from jaxspeed.placement.table import PlacementTable

DATA = "data"  # the axis of the servers' mesh along which they lie


@dataclass(frozen=True)
class ServerShard:
    """Of one parameter."""

    shape: tuple[int, ...]  # as layers read it
    stored: tuple[int, ...]  # padded
    dim: int | None  # along which it is cut; None: every server has all of it
    at: NamedSharding

    def pieces(self, x: jax.Array) -> list[jax.Array]:
        """What each server gets; of what is not cut there is one piece for all."""
        if self.dim is None:
            return [x]
        return jnp.split(pad(x, self.stored), self.at.mesh.size, self.dim)

    def joined(self, pieces: Sequence[jax.Array]) -> jax.Array:
        if self.dim is None:
            return pieces[0]
        return unpad(jnp.concatenate(pieces, self.dim), self.shape)


def cuts_of(table: PlacementTable) -> dict[str, ServerShard]:
    """By path, as a server stores what layers read from."""
    return {
        row.path: ServerShard(
            row.leaf.shape,
            row.shape(row.source),
            sharded_dim(row.source.spec, DATA),
            NamedSharding(table.mesh, PartitionSpec(*row.source.spec)),
        )
        for row in table
    }
