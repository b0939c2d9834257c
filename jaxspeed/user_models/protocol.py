"""The Model protocol: parameters, variables, init, bind; helpers of its adapters."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import ModelError
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Leaf
from jaxspeed.user_models.batch_checks import is_numeric
from jaxspeed.user_models.pretrained_model import Weights
from jaxspeed.user_models.user_code import foreign

Arrays = dict[str, Any]
MODE_ARGUMENTS = {  # arguments of a call or a loss that set its mode
    "train": True,
    "training": True,
    "is_training": True,
    "is_train": True,
    "train_mode": True,
    "enable_dropout": True,
    "inference": False,
    "is_eval": False,
    "eval_mode": False,
    "deterministic": False,
    "use_running_average": False,
}
# Attributes of nnx and Linen modules that hold a mode, with their values in evaluation.
EVALUATION = {"deterministic": True, "use_running_average": True}
STATISTICS = "use_running_average"
AFTER_STEP = "after_step"  # a method of a root module, called once per optimizer step
AFTER_MICRO_BATCHES = 0xFFFFFFFF  # the number in the keys of its random streams
SEED = "(seed)"  # the variable with the key from which every random stream is derived


class Model(Protocol):
    """A model as functions of flat dicts `{path: array}`."""

    @property
    def weights(self) -> Weights | None:
        """What is read in place of the parameters of `init`, if the model is pretrained."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Parameters: real and complex floating-point arrays."""

    @property
    def needs_values(self) -> str | None:
        """Why `init` cannot be traced, and runs in host memory; None: it is traced."""

    @property
    def variables(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """All other state: statistics, keys, buffers."""

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        """Initialize (parameters, variables), equal on every mesh."""

    def bind(self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any) -> Any:
        """Build the loss function's model, in its mode, with this micro-batch's random streams."""

    def mutated(self, bound: Any, params: Arrays) -> Arrays:
        """Collect the state variables after the loss function has run, and changed parameters."""

    def after_step(self, variables: Arrays, step: Any) -> Arrays:
        """Variables that the root module's `after_step()` changes; none if it has no such method.

        It runs once per optimizer step, after all micro-batches, and reads no parameters.
        """

    def cached(self, rows: int, length: int, params: Arrays, dtype: Any) -> "CachedModel | None":
        """The model with a key-value cache for so many sequences; None if it keeps none.

        `params` are the shapes and dtypes of the parameters as layers read them, `dtype` that of
        keys and values, where the model does not decide it.
        """

    def cached_values(self, bound: Any) -> Arrays:
        """The caches of a model of `cached`, in evaluation; otherwise none."""

    def naming(self, bound: Any) -> contextlib.AbstractContextManager[None]:
        """Context in which module calls name the equations that they trace."""

    def protect(self, bound: Any) -> None:
        """Make edits of the parameters of a bound model errors, as far as its kind allows."""

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        """Unflatten parameters to the model's tree; `absent` where the dict has none."""

    def notes(self, compute_dtype: Any) -> Sequence[str]:
        """Notes for the user on how the model is trained, one or two sentences each."""


class CachedModel(NamedTuple):
    """A model with a key-value cache of one size among its variables."""

    model: Model  # writes the caches in evaluation
    fresh: Callable[[], Arrays]  # empty caches by path
    one_by_one: bool  # a call takes one token of each sequence; else a sequence's start as well


EDITED = (
    "engine.module is a copy: an edit of its parameters does not reach the engine. Assign "
    "engine.parameters = {path: array}; for a copy of your own, initialize the model and update it"
)


def is_array(x: Any) -> bool:
    """Whether `x` is an array of numbers."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and is_numeric(x.dtype)


def is_inexact(x: Any) -> bool:
    """Whether `x` is real or complex floating-point, and so has gradients."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def mode_arguments(parameters: Mapping[str, Any], train: bool) -> dict[str, bool]:
    """Mode arguments of a signature, with their values."""
    return {name: on == train for name, on in MODE_ARGUMENTS.items() if name in parameters}


def frozen_part(leaves: Sequence[Leaf]) -> Callable[[str], bool]:
    """Return a test for whether the module at a path is frozen.

    That is, whether all its parameters are frozen; if it has none (a normalisation without scale
    and bias), those of the nearest module around it that has some.
    """
    if all(leaf.trainable for leaf in leaves):
        return lambda path: False

    def is_frozen(path: str) -> bool:
        below = f"{path}/" if path else ""
        inside = [leaf for leaf in leaves if any(p.startswith(below) for p in leaf.paths)]
        if inside or not path:
            return not any(leaf.trainable for leaf in inside)
        return is_frozen(path.rpartition("/")[0])

    return is_frozen


def has_after_step(root: Any) -> bool:
    """Whether the class of a root module has the method `after_step`."""
    return callable(getattr(type(root), AFTER_STEP, None))


def changed_after_step(
    model: Model, bind: Callable[[Arrays], Any], variables: Mapping[str, Any]
) -> Arrays:
    """What the method `after_step()` of a bound model changes.

    Args:
      bind: binds parameters, which are shapes here: they may be sharded or in host memory.
    """
    shapes = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in model.leaves}
    bound = bind(shapes)
    with foreign("the model's after_step(), in which parameters are shapes without values,"):
        getattr(bound, AFTER_STEP)()
    changed = {}
    for path, value in model.mutated(bound, shapes).items():
        if path in shapes:
            raise ModelError(
                f"the model's after_step() changes the parameter {path}, which the optimizer "
                "updates; it may change other Variables"
            )
        old = variables[path]
        value = jnp.asarray(value, old.dtype)
        if value.shape != old.shape:
            raise ModelError(
                f"the model's after_step() changes the shape of {path} from {old.shape} to "
                f"{value.shape}; what a step carries to the next keeps its shape"
            )
        changed[path] = value
    return changed


def check_collections(wanted: Sequence[str] | None, there: Iterable[str]) -> None:
    """Raise ModelError for an unknown collection: its state would not be carried."""
    names = sorted(set(there))
    for name in wanted or ():
        if name not in names:
            raise ModelError(
                f"parallel.state_collections names {name!r}, which this model does not have; it "
                f"has {', '.join(names) or 'none'}"
            )


def frozen_statistics_note(paths: Sequence[str]) -> list[str]:
    """Note on normalisations in frozen parts."""
    if not paths:
        return []
    return [
        "frozen parts normalise by their running statistics, which training does not change: "
        + listed(paths)
    ]


def nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Nest {(a, b): x} as {a: {b: x}}."""
    tree: dict[Any, Any] = {}
    for (*parents, last), value in flat.items():
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree
