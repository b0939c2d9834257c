"""What the step knows of a model."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import ModelError
from jaxspeed.objective.batch_checks import check_arrays, is_numeric
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Leaf

Arrays = dict[str, Any]
Trainable = Callable[[str, Any], bool]  # (path, the leaf as the model has it) -> is it trained
MODE_WORDS = {  # keyword arguments by which a call is told its mode
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
# Attributes of nnx and Linen modules that hold a mode, with their values in evaluation.
EVALUATION = {"deterministic": True, "use_running_average": True}
STATISTICS = "use_running_average"
SEED = "(seed)"  # the variable that holds the key from which every random stream is made


class Model(Protocol):
    """A model as functions of flat dicts `{path: array}`."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Its parameters: real and complex floating-point arrays."""

    @property
    def variables(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Everything else that it keeps: statistics, keys, buffers."""

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        """(parameters, variables) of a fresh model, equal on every mesh."""

    def bind(self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any) -> Any:
        """What the loss function is given, in its mode, with this micro-batch's random streams."""

    def mutated(self, bound: Any, params: Arrays) -> Arrays:
        """The state variables after the loss function has run, and of the parameters that `bound`
        was given those that hold another value now."""

    def naming(self, bound: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, the model's module calls leave their names on the equations that they trace."""

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        """The parameters in the model's own tree; where the dict has none, `absent`."""

    def notes(self, compute_dtype: Any) -> Sequence[str]:
        """What a user should know of how it is trained, a sentence or two each."""


def example_shapes(batch: Any) -> Any:
    """The shapes of an example batch, whose arrays may themselves be shapes."""
    check_arrays(batch, name="example_batch", abstract=True)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def is_array(x: Any) -> bool:
    """Of numbers, that is."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and is_numeric(x.dtype)


def is_inexact(x: Any) -> bool:
    """Of real or complex floating-point numbers, which have gradients."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def mode_arguments(parameters: Mapping[str, Any], train: bool) -> dict[str, bool]:
    """The mode keywords that a signature has, with their values."""
    return {word: on == train for word, on in MODE_WORDS.items() if word in parameters}


def frozen_part(leaves: Sequence[Leaf]) -> Callable[[str], bool]:
    """Whether the module at a path is part of what is not trained.

    That is, whether all of its own parameters are frozen; where it has none (a normalisation
    without scale and bias), those of the nearest module around it that has some.
    """
    if all(leaf.trainable for leaf in leaves):
        return lambda path: False

    def is_frozen(path: str) -> bool:
        inside = [leaf for leaf in leaves if leaf.path.startswith(f"{path}/" if path else "")]
        if inside or not path:
            return not any(leaf.trainable for leaf in inside)
        return is_frozen(path.rpartition("/")[0])

    return is_frozen


def check_collections(wanted: Sequence[str] | None, there: Iterable[str]) -> None:
    """ModelError for a name that no collection has: what it meant would not be carried."""
    names = sorted(set(there))
    for name in wanted or ():
        if name not in names:
            raise ModelError(
                f"parallel.state_collections names {name!r}, which this model does not have; it "
                f"has {', '.join(names) or 'none'}"
            )


def frozen_statistics_note(paths: Sequence[str]) -> list[str]:
    """What to say of normalisations that belong to frozen parts."""
    if not paths:
        return []
    return [
        "frozen parts normalise by their running statistics, which training does not move: "
        + listed(paths)
    ]


def nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """{(a, b): x} as {a: {b: x}}."""
    tree: dict[Any, Any] = {}
    for (*parents, last), value in flat.items():
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree
