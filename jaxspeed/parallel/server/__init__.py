"""The parameter server's rules, without arrays: staleness, turns and a clock.

Nothing here knows JAX: the same rules serve servers on one controller and those on Ray.
"""

from jaxspeed.parallel.server.clock import Clock
from jaxspeed.parallel.server.staleness import Ledger, Push, Rule
from jaxspeed.parallel.server.turns import Arrival, Start, Turns

__all__ = ["Arrival", "Clock", "Ledger", "Push", "Rule", "Start", "Turns"]
