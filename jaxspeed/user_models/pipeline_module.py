"""DeepSpeed's PipelineModule: a model that is a plain list of layers.

The list is applied in order, `x = layer(x)`. Its repeated layers are stored as one stack with a
first dim `layers` and run by a scan, which a pipeline partitions into stages.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from jaxspeed.config.parallelism import PARTITIONS
from jaxspeed.errors import BatchError, ModelError
from jaxspeed.user_models.batch_checks import shapes_text
from jaxspeed.user_models.layer_list import (
    KINDS,
    Function,
    TiedLayerSpec,
    as_layer,
    check_ties,
    equal,
)
from jaxspeed.user_models.repeated_run import Run, find_run, scan_run, stacked_run
from jaxspeed.user_models.user_code import foreign

_BY_TYPE = "type:"


class PipelineModule:
    """A model factory, `initialize(model=PipelineModule([...], loss_fn=...), config=...)`.

    Args:
      layers: LayerSpecs, TiedLayerSpecs, factories (lambda rngs: ...) and functions of x. The
        output of a layer is the argument of the next; a tuple is passed as one argument.
      loss_fn: `loss_fn(outputs, labels)`, with the return forms of any loss function. A batch is
        then (inputs, labels), or {"inputs": ..., "labels": ...}.
      partition_method: "uniform", "parameters", "flops", "best", or "type:regex": then only layers
        whose class name matches may repeat. All of them partition equal layers evenly.
      seed_layers: derive each layer's random streams from its index in the list, so that they do
        not depend on the layers before it.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        partition_method: str = "uniform",
        seed_layers: bool = False,
    ) -> None:
        if isinstance(layers, (nnx.Module, str, Mapping)) or not isinstance(layers, Iterable):
            raise ModelError(f"layers is a {type(layers).__name__}; it is a list, and {KINDS}")
        self.layers = [as_layer(item, place) for place, item in enumerate(layers)]
        if not self.layers:
            raise ModelError(f"layers is empty; {KINDS}")
        check_ties(self.layers)
        if not (loss_fn is None or callable(loss_fn)):
            raise ModelError(
                f"loss_fn is a {type(loss_fn).__name__}; it is called as loss_fn(outputs, labels)"
            )
        self.loss_fn, self.seed_layers = loss_fn, seed_layers
        self.partition_method = partition_method
        self._type = _type_of(partition_method)

    def __call__(self, rngs: nnx.Rngs) -> "Layers":
        """Build the model, with weights as from building its layers in order with these rngs."""
        run, tied = self.run, _Tied()

        def built(start: int, stop: int) -> nnx.List:
            return nnx.List([self._built(place, rngs, tied) for place in range(start, stop)])

        if run is None:
            return Layers({"layers": built(0, len(self.layers))}, tied, repeats=1)

        def repeat(rngs: nnx.Rngs, index: jax.Array) -> Block:
            places = range(run.start, run.start + run.period)
            return Block([self._built(p, rngs, tied, index * run.period) for p in places])

        parts: dict[str, nnx.Module] = {
            "before": built(0, run.start),
            "blocks": stacked_run(repeat, run.repeats, rngs),
            "after": built(run.stop, len(self.layers)),
        }
        return Layers(parts, tied, run.repeats)

    @cached_property
    def run(self) -> Run | None:
        """The repeated layers; None if there are none."""
        facts, labels = self._facts, []  # type: tuple[list[_Facts], list[int | None]]
        for i, layer_facts in enumerate(facts):
            kinds = (j for j in range(i) if labels[j] == j)
            alike = (j for j in kinds if self._alike(i, j))
            labels.append(None if layer_facts.barred else next(alike, i))
        return find_run(labels, [layer_facts.holds for layer_facts in facts])

    def batch_loss(self, model: Any, batch: Any) -> Any:
        """Compute the loss of (inputs, labels), as `loss_fn(model, batch)`."""
        assert self.loss_fn is not None
        inputs, labels = _inputs_and_labels(batch)
        return self.loss_fn(model(inputs), labels)

    def __str__(self) -> str:
        """List the layers, and whether each repeats or cannot."""
        run, lines = self.run, []
        for place, (layer, layer_facts) in enumerate(zip(self.layers, self._facts, strict=True)):
            repeats = run is not None and run.start <= place < run.stop
            note = "repeats" if repeats else layer_facts.barred
            lines.append(f" {place:3}  {layer!r}" + (f"  ({note})" if note else ""))
        summary = f"{run.repeats} x {run.period} layers repeat" if run else "nothing repeats"
        return "\n".join([f"{len(self.layers)} layers: {summary}", *lines])

    @cached_property
    def _facts(self) -> list["_Facts"]:
        """Facts of each built layer, from abstract evaluation."""
        facts: list[_Facts] = []

        def build() -> None:
            tied, rngs = _Tied(), nnx.Rngs(jax.random.key(0))
            modules = [self._built(place, rngs, tied) for place in range(len(self.layers))]
            owners: dict[int, list[int]] = {}
            for place, module in enumerate(modules):
                for variable in _variables(module):
                    owners.setdefault(id(variable), []).append(place)
            facts.extend(_Facts.of(m, self._type, owners) for m in modules)

        with foreign("a layer, as it is built,"), nnx.use_eager_sharding(False):
            jax.eval_shape(build)
        if self._type and all(self._type.search(layer_facts.name) is None for layer_facts in facts):
            names = ", ".join(dict.fromkeys(layer_facts.name for layer_facts in facts))
            raise ModelError(
                f"partition_method {self.partition_method!r} is the class of no layer; there are: "
                f"{names}"
            )
        return facts

    def _alike(self, i: int, j: int) -> bool:
        return (
            equal(self.layers[i], self.layers[j])
            and self._facts[i].structure == self._facts[j].structure
        )

    def _built(self, place: int, rngs: nnx.Rngs, tied: "_Tied", later: Any = 0) -> Any:
        """Build the layer at an index: a module, or for functions and ties what `_called` knows.

        In a run it stands for the layer `later` indices further on in the list.
        """
        layer = self.layers[place]
        if isinstance(layer, Function):
            return layer
        if self.seed_layers:
            streams = {name: stream.key.get_value() for name, stream in rngs.items()}
            at = place + later
            rngs = nnx.Rngs(**{n: jax.random.fold_in(key, at) for n, key in streams.items()})
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in tied:
                tied[layer.key] = layer.build(rngs)
            return layer
        return layer.build(rngs)


class Layers(nnx.Module):
    """Model of a PipelineModule: `before`, the stack `blocks` and `after`, or all in `layers`.

    In each, layers are numbered from 0. Shared modules are in `tied`, by their key.
    """

    def __init__(self, parts: Mapping[str, nnx.Module], tied: "_Tied", repeats: int) -> None:
        for name, part in parts.items():
            setattr(self, name, part)
        self.tied = nnx.Dict(tied)
        self.order, self.repeats = tuple(parts), repeats

    def __call__(self, x: Any) -> Any:
        for name in self.order:
            part = getattr(self, name)
            if isinstance(part, Block):
                x = scan_run(part, x, self.repeats)
            else:
                for layer in part:
                    x = _called(layer, x, self.tied)
        return x


class Block(nnx.List):
    """One period of the repeated layers; or, stacked, all repeats."""

    def __call__(self, x: Any) -> Any:
        for layer in self:
            x = _called(layer, x, {})
        return x


_Tied = dict[str, nnx.Module]  # by key, the modules that are shared


def _called(layer: Any, x: Any, tied: Any) -> Any:
    if isinstance(layer, TiedLayerSpec):
        shared = tied[layer.key]
        return shared(x) if layer.forward_fn is None else layer.forward_fn(shared, x)
    return layer.fn(x) if isinstance(layer, Function) else layer(x)


@dataclass(frozen=True)
class _Facts:
    """Facts of one built layer."""

    name: str  # of its class or function
    structure: Any  # its graph, and the shapes and dtypes of its state
    holds: bool  # whether it has parameters
    barred: str = ""  # reason why it cannot repeat, if any

    @staticmethod
    def of(built: Any, wanted: re.Pattern[str] | None, owners: Mapping[int, list[int]]) -> "_Facts":
        if isinstance(built, TiedLayerSpec):
            return _Facts(built.name, None, False, "tied")
        name = built.name if isinstance(built, Function) else type(built).__name__
        other = "" if wanted is None or wanted.search(name) else "of another type"
        if isinstance(built, Function):
            return _Facts(name, None, False, other)
        variables = _variables(built)
        sharing = sorted({place for v in variables for place in owners[id(v)]})
        shared = ""
        if len(sharing) > 1:
            shared = f"layers {', '.join(map(str, sharing))} share variables"
        graph, state = nnx.split(built)
        shapes = [(path, v.shape, v.dtype) for path, v in nnx.to_flat_state(state)]
        holds = any(isinstance(v, nnx.Param) for v in variables)
        return _Facts(name, (graph, shapes), holds, other or shared)


def _variables(built: Any) -> list[nnx.Variable]:
    if not isinstance(built, nnx.Module):
        return []
    return [node for _, node in nnx.iter_graph(built) if isinstance(node, nnx.Variable)]


def _type_of(method: Any) -> re.Pattern[str] | None:
    """Compile the pattern of "type:regex", case-insensitive as in DeepSpeed."""
    word = method.lower() if isinstance(method, str) else ""
    if word in PARTITIONS:
        return None
    known = f'it is one of {", ".join(PARTITIONS)}, or "type:" and a regex'
    if not word.startswith(_BY_TYPE):
        raise ModelError(f"partition_method is {method!r}; {known}")
    pattern = method[len(_BY_TYPE) :]
    try:
        if not pattern:
            raise re.error("there is none")
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ModelError(
            f"partition_method {method!r} holds no regex: {error}; {known}, as type:transformer"
        ) from None


def _inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping) and set(batch) == {"inputs", "labels"}:
        return batch["inputs"], batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise BatchError(
        'with the loss_fn of a PipelineModule a batch is (inputs, labels), or {"inputs": ..., '
        f'"labels": ...}}; this one has {shapes_text(batch)}. For other batches pass '
        "initialize(..., loss_fn=lambda model, batch: ...)"
    )
