"""Parameters as stacks of matrices, for the optimizers that see matrices."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class MatrixView:
    """How a leaf is a stack of matrices `[inputs, outputs]`.

    Attributes:
      shape: of the leaf.
      stack: number of leading dims that number matrices: layers, experts.
      rows: number of the dims after those that are a matrix's rows.
      heads: number of equal parts of the columns that are matrices of their own.
    """

    shape: tuple[int, ...]
    stack: int
    rows: int
    heads: int = 1

    @property
    def count(self) -> int:
        """Number of matrices, without the division into heads."""
        return math.prod(self.shape[: self.stack])

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        inner = self.shape[self.stack :]
        return math.prod(inner[: self.rows]), math.prod(inner[self.rows :])

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of one matrix, or of one head's part of it."""
        rows, columns = self.matrix
        return rows, columns // self.heads

    def stacked(self, x: jax.Array) -> jax.Array:
        """The leaf as `[count, rows, columns]`."""
        return x.reshape(self.count, *self.matrix)

    def divided(self, x: jax.Array) -> jax.Array:
        """Matrices `[n, rows, columns]` as their heads `[n heads, rows, columns / heads]`."""
        if self.heads == 1:
            return x
        rows, columns = self.block
        return x.reshape(-1, rows, self.heads, columns).swapaxes(1, 2).reshape(-1, rows, columns)

    def joined(self, x: jax.Array) -> jax.Array:
        """The matrices of `divided` ones."""
        if self.heads == 1:
            return x
        rows, columns = self.block
        return x.reshape(-1, self.heads, rows, columns).swapaxes(1, 2).reshape(-1, *self.matrix)


# The view of a leaf by its path and value; None where it has no matrices.
ViewOf = Callable[[str, Any], MatrixView | None]


def view_of(shape: Sequence[int], stack: int, inputs: int | None) -> MatrixView | None:
    """The view of a leaf; None if it has no matrices.

    A convolution `[height, width, in, out]` is one matrix of (height width in) x out.

    Args:
      stack: number of leading dims that number layers and experts.
      inputs: number of the dims after those that are inputs, if it is known.
    """
    dims = len(shape) - stack
    rows = inputs if inputs is not None else {2: 1, 4: 3}.get(dims)
    if rows is None or not 0 < rows < dims:
        return None
    return MatrixView(tuple(shape), stack, rows)
