"""The HTML page of a plan: one self-contained file, a pure function of the figures of `--json`."""

from jaxspeed.planner.page.document import page_of

__all__ = [
    "page_of",
]
