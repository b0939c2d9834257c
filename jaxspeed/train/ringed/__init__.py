"""Data ranks that add up their gradients around rings, in place of XLA's collectives.

`rings` says which rings a mesh has and which leaves go round them together, `reduction` takes each
rank's partial gradients to sums that are cut as the optimizer's state is, and its results back to
what layers read; `exchange` is how the units of ZeRO 3 gather and scatter their own.
"""

from jaxspeed.train.ringed.exchange import Exchange
from jaxspeed.train.ringed.reduction import Reduction
from jaxspeed.train.ringed.rings import Rings, data_spec, rings_of

__all__ = ["Exchange", "Reduction", "Rings", "data_spec", "rings_of"]
