"""Tensor parallelism: what a traced program says of its dims, and where it must communicate.

A parameter's row says which of its dims is cut over `tensor`. From there dims are followed through
the traced program (`follow`, by the rules of `primitives`, into `classes`); where an activation
enters or leaves the cut (`crossings`) a collective is due, and is written into the program
(`write`, `sides`, `moves`), or is broken into the steps of a ring beside the product that it feeds
(`ring`).

Where nothing says what is cut, it is inferred: which product feeds which (`products`), what each
cut would send (`costs`), and which set of cuts is best (`propose`).
"""

from jaxspeed.parallel.tensor.crossings import dims_cut_over
from jaxspeed.parallel.tensor.follow import Followed, follow
from jaxspeed.parallel.tensor.products import uses_of
from jaxspeed.parallel.tensor.proposal import Proposal
from jaxspeed.parallel.tensor.propose import propose
from jaxspeed.parallel.tensor.sides import AS_WHOLE, Style, best_overlap
from jaxspeed.parallel.tensor.write import with_crossings

__all__ = [
    "AS_WHOLE",
    "Followed",
    "Proposal",
    "Style",
    "best_overlap",
    "dims_cut_over",
    "follow",
    "propose",
    "uses_of",
    "with_crossings",
]
