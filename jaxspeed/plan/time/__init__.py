"""How long a step takes, estimated: of the opened step, what is exchanged (`traffic`) and what its
operations cost (`work`); `links` has the target's, `flow` what runs at once, `roofline` adds it up.
"""

from jaxspeed.plan.time.exchange import Exchange
from jaxspeed.plan.time.roofline import time_in, time_of
from jaxspeed.plan.time.told import Time

__all__ = ["Exchange", "Time", "time_in", "time_of"]
