"""Placement of every array: mesh, axis rules, ZeRO sharding and the placement table."""

from jaxspeed.placement.mesh import AXES, DATA_AXES, build_mesh
from jaxspeed.placement.rows import Leaf, Placement, Precision, Row
from jaxspeed.placement.table import PlacementTable, build_table

__all__ = [
    "AXES",
    "DATA_AXES",
    "Leaf",
    "Placement",
    "PlacementTable",
    "Precision",
    "Row",
    "build_mesh",
    "build_table",
]
