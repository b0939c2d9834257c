"""Which batch shapes were compiled for: a new one is logged, and too many are warned of."""

import logging
from typing import Any

import jax

log = logging.getLogger("jaxspeed")

MANY = 4  # shapes of one program from which on recompiling is a habit


class ShapeLog:
    """Remembers the batch shapes that one program has seen."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._seen: dict[Any, int] = {}

    def see(self, batch: Any) -> bool:
        """Whether these shapes are new; says so in the log."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        key = tuple((jax.tree_util.keystr(k), tuple(x.shape), str(x.dtype)) for k, x in leaves)
        if key in self._seen:
            return False
        self._seen[key] = len(self._seen) + 1
        shown = ", ".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in key)
        log.info("%s: compiling for batch %s", self._program, shown)
        if len(self._seen) >= MANY:
            log.warning(
                "%s: this is the %dth batch shape, and each is compiled anew; pad batches to a few "
                "fixed shapes. Now: %s",
                self._program,
                len(self._seen),
                shown,
            )
        return True
