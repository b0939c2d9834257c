"""Data ranks that add up their gradients around rings, in place of XLA's collectives.

`rings` says which rings a mesh has and which leaves go round them together, `reduction` takes each
rank's partial gradients to sums that are cut as the optimizer's state is, and its results back to
what layers read; `exchange` is how the units of ZeRO 3 gather and scatter their own. `gradients`
puts them together.
"""

from jaxspeed.train.ringed.gradients import RingGradients
from jaxspeed.train.ringed.reduction import OF_DEVICES, Reduction
from jaxspeed.train.ringed.rings import Rings, rings_of

__all__ = ["OF_DEVICES", "Reduction", "RingGradients", "Rings", "rings_of"]
