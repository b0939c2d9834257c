"""Mixtures of experts: what models call to route tokens, and to balance the load of experts."""

from jaxspeed.ops.moe.balance import Balance, updated_bias
from jaxspeed.ops.moe.dispatch import Rows, mixture, rounds_of
from jaxspeed.ops.moe.routing import Routing, capacity_of, check_router, route

__all__ = [
    "Balance",
    "Routing",
    "Rows",
    "capacity_of",
    "check_router",
    "mixture",
    "rounds_of",
    "route",
    "updated_bias",
]
