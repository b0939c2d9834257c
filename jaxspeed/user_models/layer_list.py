"""Layers in the list of a PipelineModule: LayerSpec, factories, functions, and their equality."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax import nnx

from jaxspeed.errors import ModelError
from jaxspeed.user_models.nnx_model import keep_arrays

KINDS = (
    "a layer is jaxspeed.LayerSpec(cls, ...), jaxspeed.TiedLayerSpec(key, cls, ...), a factory "
    "with a parameter of that name (lambda rngs: ...), or a function of x"
)


class LayerSpec:
    """A layer to build: `cls(*args, **kwargs, rngs=rngs)`, as in DeepSpeed.

    `rngs` is passed only if `cls` takes it.
    """

    def __init__(self, cls: type[nnx.Module], /, *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, nnx.Module)):
            description = cls.__name__ if isinstance(cls, type) else f"a {type(cls).__name__}"
            raise ModelError(
                f"{type(self).__name__} is given {description}; it takes a class of nnx.Module and "
                f"its arguments: {type(self).__name__}(nnx.Linear, 8, 8)"
            )
        if "rngs" in kwargs:
            raise ModelError(
                f"{type(self).__name__}({cls.__name__}, ..., rngs=...): remove rngs; it gets "
                "those of the model when it is built"
            )
        self.cls, self.args, self.kwargs = cls, args, kwargs

    @property
    def name(self) -> str:
        """The name of the layer's class."""
        return self.cls.__name__

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """The layer, with `rngs` if its class takes them."""
        keywords = {"rngs": rngs} if _takes_rngs(self.cls.__init__, through_kwargs=True) else {}
        return _with_arrays(self.cls(*self.args, **self.kwargs, **keywords))

    def __repr__(self) -> str:
        shown = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(shown)})"


class TiedLayerSpec(LayerSpec):
    """A layer whose module is shared by all layers with the same key, as in DeepSpeed.

    It is called as `forward_fn(module, x)` if that is given: a head that reads the embedding's
    table is `TiedLayerSpec("embed", nnx.Embed, ..., forward_fn=lambda embed, x: embed.attend(x))`.
    """

    def __init__(
        self,
        key: str,
        cls: type[nnx.Module],
        /,
        *args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(key, str) or not key or "/" in key:
            raise ModelError(
                f'TiedLayerSpec is given the key {key!r}; it takes text without "/", the same '
                'for all layers that share a module: TiedLayerSpec("embed", nnx.Embed, ...)'
            )
        super().__init__(cls, *args, **kwargs)
        if not (forward_fn is None or callable(forward_fn)):
            raise ModelError(
                f"TiedLayerSpec({key!r}, ...): forward_fn is a {type(forward_fn).__name__}; it is "
                "called as forward_fn(module, x)"
            )
        self.key, self.forward_fn = key, forward_fn

    def __repr__(self) -> str:
        return f"{super().__repr__()} tied as {self.key!r}"


class Factory:
    """`lambda rngs: Module`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        module = self.fn(rngs=rngs)
        if not isinstance(module, nnx.Module):
            raise ModelError(
                f"the factory {_function_name(self.fn)} in the list of layers returned a "
                f"{type(module).__name__}; it must return an nnx.Module"
            )
        return _with_arrays(module)

    def __repr__(self) -> str:
        return f"a factory {_function_name(self.fn)}"


class Function:
    """`x -> x`, without parameters."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn, self.name = fn, _function_name(fn)

    def __repr__(self) -> str:
        return f"function {self.name}"


Layer = LayerSpec | Factory | Function


def as_layer(item: Any, place: int) -> Layer:
    """Convert one item of the list; raise ModelError with its index if it is no layer."""
    if isinstance(item, LayerSpec):
        return item
    if isinstance(item, nnx.Module):
        kind = type(item).__name__
        raise ModelError(
            f"layer {place} is a built {kind}; pass its spec, so that it can be initialized "
            f"sharded: jaxspeed.LayerSpec({kind}, ...), or "
            f"lambda rngs: {kind}(..., rngs=rngs)"
        )
    if isinstance(item, nn.Module) or (isinstance(item, type) and issubclass(item, nn.Module)):
        raise ModelError(
            f"layer {place} is a Linen module; the layers of a list are modules of flax.nnx: "
            "lambda rngs: nnx.bridge.ToNNX(..., rngs=rngs).lazy_init(x) makes one of it"
        )
    if isinstance(item, type) and issubclass(item, nnx.Module):
        return LayerSpec(item)
    if isinstance(item, type) or not callable(item):
        description = item.__name__ if isinstance(item, type) else f"a {type(item).__name__}"
        raise ModelError(f"layer {place} is {description}; {KINDS}")
    return Factory(item) if _takes_rngs(item) else Function(item)


def equal(a: Layer, b: Layer) -> bool:
    """Whether two layers have the same class and arguments, or the same function.

    Two functions are the same if they are one object, or have the same code and close over equal
    values, as those that a comprehension makes from one lambda.
    """
    if isinstance(a, TiedLayerSpec) or isinstance(b, TiedLayerSpec) or type(a) is not type(b):
        return False
    if isinstance(a, LayerSpec):
        assert isinstance(b, LayerSpec)
        return a.cls is b.cls and _same((a.args, a.kwargs), (b.args, b.kwargs))
    return _same_function(a.fn, b.fn)  # type: ignore[union-attr]


def check_ties(layers: list[Layer]) -> None:
    """Raise ModelError unless all layers of one key have the same class and arguments."""
    first: dict[str, TiedLayerSpec] = {}
    for place, layer in enumerate(layers):
        if not isinstance(layer, TiedLayerSpec):
            continue
        known = first.setdefault(layer.key, layer)
        alike = _same((known.cls, known.args, known.kwargs), (layer.cls, layer.args, layer.kwargs))
        if not alike:
            raise ModelError(
                f"layer {place} is {layer!r}, but an earlier layer of that key is {known!r}; tied "
                "layers share one module: give them one class and equal arguments, or two keys"
            )


def _with_arrays(module: nnx.Module) -> nnx.Module:
    keep_arrays(module)
    return module


def _same_function(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        bound = _same((a.args, a.keywords), (b.args, b.keywords))
        return bound and _same_function(a.func, b.func)
    if not (isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType)):
        return False
    return (
        a.__code__ == b.__code__
        and a.__globals__ is b.__globals__
        and _same(
            (a.__closure__, a.__defaults__, a.__kwdefaults__),
            (b.__closure__, b.__defaults__, b.__kwdefaults__),
        )
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two values are known to be equal; arrays, without one truth value, are not."""
    try:
        return bool(a == b)
    except Exception:
        return False


def _takes_rngs(fn: Callable[..., Any], *, through_kwargs: bool = False) -> bool:
    if fn is object.__init__:
        return False
    try:
        parameters = inspect.signature(fn).parameters
    except (ValueError, TypeError):  # of some functions written in C
        return False
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "rngs" in parameters or (through_kwargs and rest)


def _function_name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
