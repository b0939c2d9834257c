"""A model whose parameters are read instead of initialized."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxspeed.placement.codec import Codec

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Origin:
    """Where weights are read from, and what distinguishes them from others.

    Attributes:
      folder: that has the files.
      files: a digest of each.
    """

    folder: str
    files: Mapping[str, str]


class Weights(Protocol):
    """The values of a model's parameters, of which any block can be read.

    Attributes:
      variables: paths of variables that are read as well; the others are initialized.
      initialized: paths of parameters that they lack, such as a new head.
    """

    variables: Sequence[str]
    initialized: Collection[str]

    @property
    def origin(self) -> Origin | None:
        """The folder from which they can be read again; None if there is none."""

    def check(self, parameters: Mapping[str, tuple[int, ...]]) -> None:
        """Raise PretrainedError unless they have these parameters; reads no values."""

    def read(self, path: str, index: Index, dtype: Any) -> np.ndarray:
        """A new array with a block of a parameter, given as a slice with both ends per dim."""

    def encoded(
        self, path: str, layer: int | None, codec: Codec
    ) -> Mapping[str, np.ndarray] | None:
        """The arrays of a codec, of a layer of a stack, if the values are stored as such."""


@dataclass(frozen=True)
class Pretrained:
    """A model for `initialize(model=...)`, with its weights.

    Args:
      model: a factory of an nnx.Module, a Linen module, or a pair (init, apply).
      loss: its loss function, if it has one of its own.
      config: its sizes, if it is of a family.
      objective: the name of the objective that its loss is, if it is of a family.
    """

    model: Any
    weights: Weights
    loss: Callable[[Any, Any], Any] | None = None
    config: Any = None
    objective: str | None = None
