"""`Objective`: the base class of what a model is trained for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxspeed.config.objective_options import ObjectiveOptions
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.padding import WithoutWeight

if TYPE_CHECKING:
    import jax

Records = Literal["documents", "preference", "unpaired", "prompts"]


class Objective(ABC):
    """What a model is trained for: its loss, and what its batches hold.

    A config names a subclass, `"objective": {"type": "package.module:Name"}`. `loss` is all that it
    must define.

    Attributes:
      options: the values of the section's own keys.
      arrays: the names of a batch's arrays, with their meaning. A batch of others than those of the
        model's family is read from the data as it is.
      entire_batch: whether the loss of a sample depends on the others of its micro-batch. Then it
        is computed on entire micro-batches, and no proof is tried that each rank may compute it on
        its own samples.
      records: of which form its data are: documents, or pairs of completions from the records of
        preferences, or of completions with a label. Pairs are in a batch as `pairs.py` has them.
        Of prompts alone, completions are sampled while it trains, and scored by rewards.
      drops_long: whether sequences of pairs are read in full, as for a score: those longer than
        data.seq_len + 1 are left out, not truncated, and the last token of each is an input too.
      num_labels: of scores that a family's decoder gets in place of its head.
      modules_to_save: names of modules that are trained in full beside adapters too.
      in_fp32: names of arrays that are not converted to the compute dtype.
      dropout: whether the model and its adapters have dropout in training.
      without_weight: optionally a method (batch, padding) -> batch, in which samples have no weight
        where `padding` [batch] is True. The names of its arrays do not depend on `padding`. With
        it, evaluation pads the last batch. Without it the last batch is smaller, and samples that
        the data ranks cannot share are evaluated one by one.
    """

    class Options(ObjectiveOptions):
        """Keys of the section `objective` beside `type`, in a subclass of this class."""

    arrays: ClassVar[Mapping[str, str]] = {}
    entire_batch: ClassVar[bool] = False
    records: Records = "documents"
    drops_long: ClassVar[bool] = False
    num_labels: ClassVar[int | None] = None
    modules_to_save: ClassVar[tuple[str, ...]] = ()
    in_fp32: ClassVar[tuple[str, ...]] = ()
    without_weight: WithoutWeight | None = None

    def __init__(self, options: Any = None) -> None:
        self.dropout = True
        self.options: Any = self.Options() if options is None else options

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Any:
        """Compute the loss of a batch, in any form that `initialize(loss_fn=...)` may return.

        A subclass's method may have the further parameters of a loss_fn: `train`, `rng`, `extra`.
        """

    def computed(self) -> Sequence[ComputedArrays]:
        """The arrays that passes without gradient add to a batch before the loss, in this order."""
        return ()

    @property
    def data_arrays(self) -> set[str]:
        """The names of `arrays` that the data have: those that are not computed."""
        return {*self.arrays}.difference(*(entry.writes for entry in self.computed()))

    def tokens(self, sample: Mapping[str, "jax.ShapeDtypeStruct"]) -> int | None:
        """Number of tokens of a sample, from its arrays' shapes; None: as the data have it."""
        return None

    def trained_model(self, model: Any) -> Any:
        """The model to train, for example with a scalar head, from the one that is configured.

        Each is what `initialize(model=...)` takes, such as a factory of an nnx.Module.
        """
        return model


def objective_of(loss_fn: Callable[..., Any]) -> Objective | None:
    """The objective whose loss this is; None for a plain function."""
    owner = getattr(loss_fn, "__self__", None)
    return owner if isinstance(owner, Objective) else None
