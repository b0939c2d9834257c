"""Placement of every array: mesh, axis rules, ZeRO sharding and the placement table."""

from jaxspeed.placement.mesh import build_mesh
from jaxspeed.placement.rows import Leaf, Placement
from jaxspeed.placement.table import PlacementTable, build_table

__all__ = [
    "Leaf",
    "Placement",
    "PlacementTable",
    "build_mesh",
    "build_table",
]
