"""A plan as one HTML file that needs nothing else: a pure function of the figures of `--json`."""

from jaxspeed.planner.page.document import page_of

__all__ = [
    "page_of",
]
