"""How the loss calls a Flax Linen module: with its variables, its mode and its random streams."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from threading import RLock
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
from flax.core import lift, meta
from flax.core.scope import DenyList, in_filter, union_filters

from jaxspeed.jaxpr.module_scopes import scope
from jaxspeed.user_models.protocol import STATISTICS, mode_arguments
from jaxspeed.user_models.rng import FALLBACK

_lock = RLock()  # of the methods of nn.Module that are replaced, for all threads


class _Methods:
    """The module's own methods and fields: `model.encode(x)` is `model(x, method="encode")`."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        value = getattr(self.module, name)
        is_method = inspect.isfunction(getattr(type(self.module), name, None))
        return functools.partial(self.__call__, method=name) if is_method else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class BoundLinen(_Methods):
    """A Linen module with its variables, callable like the module; stores what a call changes.

    `variables` also holds what the calls so far have sown: `model.variables["losses"]`. Calls take
    `rngs`, `mutable` and `capture_intermediates` as `Module.apply` does, but all changes are
    stored: `mutable` selects the collections that are returned as well.
    """

    def __init__(
        self,
        module: nn.Module,
        variables: Any,
        rngs: dict[str, jax.Array],
        training: bool,
        is_frozen: Callable[[str], bool],
        mutable: DenyList,
    ) -> None:
        self.module, self.variables, self.training = module, variables, training
        self.rngs, self.is_frozen = rngs, is_frozen
        self.seen = ModuleCalls(set(), set())
        # All but parameters; in evaluation what calls sow, and state that shares its collection.
        self._mutable = mutable

    def __call__(self, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
        every = union_filters(self._mutable, mutable)
        out, changed = self.apply(self.variables, *args, mutable=every, **kwargs)
        self.variables = {**self.variables, **changed}
        return _with_collections(out, changed, mutable)

    def apply(
        self, variables: Any, *args: Any, rngs: Any = None, method: Any = None, **kwargs: Any
    ) -> Any:
        """`Module.apply` with the mode and the random streams of this micro-batch."""
        kwargs = {**_mode(self.module, method, self.training), **kwargs}
        with frozen_statistics(self.is_frozen) if self.training else _in_evaluation():
            streams = {**self.rngs, **_streams(rngs)}
            return self.module.apply(variables, *args, rngs=streams, method=method, **kwargs)


class CreatingLinen(_Methods):
    """Stand-in for the module during initialization: its calls create the variables.

    Each creates all that it reads, from the same key: as one call of all of them would, since
    values depend on the key and the path. What is in `created` already stays as it is.
    """

    def __init__(
        self, module: nn.Module, rngs: Mapping[str, jax.Array], created: Any, training: bool
    ) -> None:
        self.module, self._rngs, self.training = module, rngs, training
        self.created = created
        self.variables: Any = {"params": {}, **meta.unbox(created)}  # as the loss may look at them

    def __call__(
        self,
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Any = False,
        **kwargs: Any,
    ) -> Any:
        kwargs = {**_mode(self.module, method, self.training), **kwargs}
        streams = {**self._rngs, **_streams(rngs), FALLBACK: self._rngs[FALLBACK]}
        out, created = self.module.init_with_output(
            streams, *args, method=method, mutable=True, **kwargs
        )
        self.created = _merged(self.created, created)
        self.variables = meta.unbox(self.created)
        return _with_collections(out, self.variables, mutable)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """A call: the variables are those that are being created."""
        return self(*args, **kwargs)


def _streams(rngs: Any) -> dict[str, Any]:
    """Random streams as `Module.apply` takes them: a key is that of `params`."""
    if rngs is None:
        return {}
    return dict(rngs) if isinstance(rngs, Mapping) else {FALLBACK: rngs}


def _with_collections(out: Any, variables: Any, mutable: Any) -> Any:
    """(out, the collections that the user's call names), or `out` where it names none."""
    if mutable is False:
        return out
    return out, {name: x for name, x in variables.items() if in_filter(mutable, name)}


def _merged(old: Any, new: Any) -> Any:
    """Nested dicts with the entries of both, of which the old ones stay."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return old
    return {**new, **{name: _merged(x, new.get(name)) for name, x in old.items()}}


def is_leaked(x: Any, key: Any) -> bool:
    """Whether an array is a tracer of another trace than the key's, one that has ended."""
    traces = [getattr(tracer, "_trace", None) for tracer in (x, key)]
    return None not in traces and traces[0] is not traces[1]


def _mode(module: nn.Module, method: Any, training: bool) -> dict[str, bool]:
    """The mode arguments of a method, such as `train` or `deterministic`."""
    called = getattr(module, method) if isinstance(method, str) else method or type(module).__call__
    modes = mode_arguments(inspect.signature(called).parameters, training)
    # Flax refuses a mode that is both a field and an argument (`nn.merge_param`).
    return {name: on for name, on in modes.items() if name not in _mode_fields(module)}


def _mode_fields(module: nn.Module) -> dict[str, bool]:
    """The module's own fields that hold a mode, with their values in evaluation."""
    modes = mode_arguments({field.name: field for field in fields(module)}, False)
    return {name: on for name, on in modes.items() if isinstance(getattr(module, name, None), bool)}


def in_evaluation(module: nn.Module) -> nn.Module:
    """The module with its own fields that hold a mode set for evaluation, as a loss reads them."""
    modes: dict[str, Any] = _mode_fields(module)
    return module.clone(**modes) if modes else module


@contextlib.contextmanager
def _in_evaluation() -> Iterator[None]:
    """Context in which the same fields of every module that is called are set for evaluation.

    Before `setup`, and also of modules that are made in a call.
    """

    def call(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        for name, on in _mode_fields(context.module).items():
            object.__setattr__(context.module, name, on)
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(call):
        yield


class ModuleCalls(NamedTuple):
    """What modules did in their calls."""

    sown: set[tuple[str, ...]]  # (collection, ...) paths
    streams: set[str]  # random streams that they asked for


@contextlib.contextmanager
def recorded_calls(seen: ModuleCalls) -> Iterator[None]:
    """Context in which what modules sow and ask for is added to `seen`.

    They ask for a stream by `has_rng`, and by `split_rngs` of a lifted transformation: where
    `make_rng` falls back to `params`, it would draw from a stream that is not split. These are
    replaced, since `nn.intercept_methods` sees methods of a model's classes, not of `nn.Module`.
    """
    sow, has_rng, pack = nn.Module.sow, nn.Module.has_rng, lift.pack

    def recorded_sow(self: Any, col: str, name: str, *args: Any, **kwargs: Any) -> bool:
        seen.sown.add((col, *self.path, name))
        return sow(self, col, name, *args, **kwargs)

    def recorded_has_rng(self: Any, name: str) -> bool:
        seen.streams.add(name)
        return has_rng(self, name)

    def recorded_pack(
        fn: Any, ins: Any, outs: Any, rngs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        for filtered in rngs:  # a stream's name, several, a filter of names, or whether all
            names = [filtered] if isinstance(filtered, str) else filtered
            if isinstance(names, list | tuple | set | frozenset):
                seen.streams.update(name for name in names if isinstance(name, str))
        return pack(fn, ins, outs, rngs, *args, **kwargs)

    with (
        _lock,
        mock.patch.object(nn.Module, "sow", recorded_sow),
        mock.patch.object(nn.Module, "has_rng", recorded_has_rng),
        mock.patch.object(lift, "pack", recorded_pack),
    ):
        yield


@contextlib.contextmanager
def frozen_statistics(is_frozen: Callable[[str], bool]) -> Iterator[None]:
    """Context in which normalisations of frozen parts use their running statistics unchanged."""

    def call(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if (
            context.method_name == "__call__"
            and hasattr(module, STATISTICS)
            and is_frozen("/".join(module.path))
        ):
            # Flax takes it as a setting of the module or as an argument, and refuses both.
            bound = inspect.signature(type(module).__call__).bind(module, *args, **kwargs)
            bound.arguments.pop(STATISTICS, None)
            if getattr(module, STATISTICS) is None:
                bound.arguments[STATISTICS] = True
            else:
                object.__setattr__(module, STATISTICS, True)
            return next_fun(*bound.args[1:], **bound.kwargs)
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(call):
        yield


@contextlib.contextmanager
def traced_calls(seen: ModuleCalls) -> Iterator[None]:
    """Context of `recorded_calls` in which each call is traced in a scope of its class and path."""

    def name(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        with scope(type(context.module).__name__, "/".join(context.module.path)):
            return next_fun(*args, **kwargs)

    with recorded_calls(seen), nn.intercept_methods(name):
        yield
