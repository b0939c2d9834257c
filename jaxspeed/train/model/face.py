"""What the step knows of a model."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.placement.rows import Leaf
from jaxspeed.train.batches import check_arrays, is_numeric

Arrays = dict[str, Any]
Trainable = Callable[[str, Any], bool]  # (path, the leaf as the model has it) -> is it trained
MODE_WORDS = {  # keyword arguments by which a call is told its mode
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
SEED = "(seed)"  # the variable that holds the key from which every random stream is made


class Model(Protocol):
    """A model as functions of flat dicts `{path: array}`."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Its floating parameters."""

    @property
    def variables(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Everything else that it keeps: statistics, keys, buffers."""

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        """(parameters, variables) of a fresh model, equal on every mesh."""

    def bind(self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any) -> Any:
        """What the loss function is given, in its mode, with this micro-batch's random streams."""

    def mutated(self, bound: Any) -> Arrays:
        """The variables after the loss function has run."""

    def naming(self, bound: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, the model's module calls leave their names on the equations that they trace."""

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        """The parameters in the model's own tree; where the dict has none, `absent`."""


def example_shapes(batch: Any) -> Any:
    """The shapes of an example batch, whose arrays may themselves be shapes."""
    check_arrays(batch, name="example_batch", abstract=True)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def is_array(x: Any) -> bool:
    """Of numbers, that is."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and is_numeric(x.dtype)


def is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def mode_arguments(parameters: Mapping[str, Any], train: bool) -> dict[str, bool]:
    """The mode keywords that a signature has, with their values."""
    return {word: on == train for word, on in MODE_WORDS.items() if word in parameters}


def nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """{(a, b): x} as {a: {b: x}}."""
    tree: dict[Any, Any] = {}
    for (*parents, last), value in flat.items():
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree
