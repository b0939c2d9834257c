"""Units: the pieces of a model whose stored parameters come to life one at a time.

A program is traced with names on its module calls (`tags`), the calls that are units are chosen
(`choose`), the program is cut at those names (`pieces`) and run again (`slicing`), each piece
gathering its own parameters forward and backward (`piece`, `stored`, `views`) and keeping between
its passes what the config says (`keeping`).
"""

from jaxspeed.placement.units.choose import Units, choose_units
from jaxspeed.placement.units.pieces import Way
from jaxspeed.placement.units.slicing import run_sliced
from jaxspeed.placement.units.stored import Exchange, Stored
from jaxspeed.placement.units.tags import tagged, unit

__all__ = ["Exchange", "Stored", "Units", "Way", "choose_units", "run_sliced", "tagged", "unit"]
