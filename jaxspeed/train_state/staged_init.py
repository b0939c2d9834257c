"""Initialization of arrays in small programs: equal ones are compiled once.

The initialization of a model, traced once, is sliced into one program for each group of results
that share computation, mostly a single parameter. Of a hundred layers, the programs of one weight
are equal but for the numbers that are folded into their random keys, which become arguments. Those
that no other equals are joined while they are small: each program costs a tenth of a second. A
later call with an equal program, as of another engine for the same model, compiles nothing. They
are compiled side by side, in threads.

Small programs also bound the memory of a device where the arrays are in host memory: one program
for all of them may compute them all before it copies any, at its scheduler's choice.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.sharding import Mesh

from jaxspeed.disk.disk_array import in_memory, is_on_disk
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.merge_programs import Atoms, DifferentProgram, merge_programs
from jaxspeed.jaxpr.rewriter import Rewriter, Rewriting
from jaxspeed.jaxpr.slicing import slice_of, sub_jaxpr
from jaxspeed.jaxpr.traverse import is_var, nested_constants
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.xla_options import init_options

_SMALL = 1024  # elements: a random key, a scale; computed again for each result that reads it
_REPEATED = 4  # slices may have this many times the equations of the one program
_HOST_BYTES = 256 << 20  # per device, on their way to host memory
_JOINED_BYTES = 32 << 20  # per device, of results that no other equals: one program


def staged_init(function: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    """Evaluate `function(*args)` into these shardings."""
    return StagedInit(function, shardings, *args)(*args)


class StagedInit:
    """A function for arguments of these shapes, compiled in the background.

    A result in whose place `shardings` have an array on a disk is written there as it is computed.
    """

    def __init__(self, function: Callable[..., Any], shardings: Any, *shapes: Any) -> None:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*shapes)
        jaxpr = _IntegersFolded().run(closed.jaxpr)
        self._tree = jax.tree.structure(shape)
        places = jax.tree.leaves(shardings, is_leaf=is_on_disk)
        self._on_disk = {i: x for i, x in enumerate(places) if is_on_disk(x)}
        self._places = [x.sharding if is_on_disk(x) else x for x in places]
        self._sources, self._consts = [*jaxpr.constvars, *jaxpr.invars], closed.consts
        operands = [*closed.consts, *jax.tree.leaves(shapes)]
        ahead = not is_traced(operands) and not any(map(_is_placed, operands))
        self._programs = [
            (_compiled(merged, tuple(self._places[i] for i in members[0]), ahead), atoms, members)
            for merged, atoms, members in _programs(jaxpr, self._sources, self._places)
        ]

    def __call__(self, *args: Any) -> Any:
        arguments = jax.tree.leaves(args, is_leaf=is_on_disk)
        values = dict(zip(self._sources, [*self._consts, *arguments], strict=True))
        results: list[Any] = [None] * len(self._places)
        waiting = 0
        for run, atoms, members in self._programs:
            for number, outputs in enumerate(members):
                inputs = (group[number] for group in atoms)
                arrays = run(*(in_memory(values[v]) if is_var(v) else v.val for v in inputs))
                for i, result in zip(outputs, arrays, strict=True):
                    disk = self._on_disk.get(i)
                    results[i] = disk.write(result) if disk else result
                    at = self._places[i]
                    waiting += _device_bytes(result, at) if in_host(at) else 0
                if waiting > _HOST_BYTES:
                    waiting = 0
                    jax.block_until_ready(arrays)
                del arrays, result  # what is on a disk is freed before the next is computed
        return jax.tree.unflatten(self._tree, results)


_THREADS = ThreadPoolExecutor(thread_name_prefix="jaxspeed-compile")


def compile_in_background(function: Any, *shapes: Any) -> Callable[..., Any]:
    """A jitted function, compiled for these shapes in a thread while this one goes on.

    Tracing and lowering happen here: they depend on contexts of this thread, and hold the GIL.
    """
    compiled = _THREADS.submit(function.lower(*shapes).compile)
    return lambda *args: (function if is_traced(args) else compiled.result())(*args)


def compile_ahead(mesh: Mesh, function: Any, *args: Any) -> Callable[[], Any]:
    """Start to compile a jitted function in a thread; what is returned waits for it.

    JAX keeps the executable for later calls, which raise what is wrong with it. On GPUs the
    function is only traced: XLA:GPU chooses kernels by measuring them on the device.
    """
    traced = function.trace(*args)
    if mesh.devices.flat[0].platform == "gpu":
        return lambda: None
    return _THREADS.submit(traced.lower().compile).exception


def compile_beside(lowered: Any, meanwhile: Callable[[], None] | None) -> Any:
    """Compile in a thread; `meanwhile` is called if that takes more than a second."""
    compiled = _THREADS.submit(lowered.compile)
    if meanwhile and wait([compiled], 1.0).not_done:
        meanwhile()
    return compiled.result()


def is_traced(tree: Any) -> bool:
    """Whether some values are those of a trace, as under `jax.eval_shape`."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _is_placed(x: Any) -> bool:
    """Whether an array, or one of this shape, is on certain devices: then jit reads from where."""
    return bool(getattr(x, "committed", getattr(x, "sharding", None) is not None))


def _programs(
    jaxpr: Any, sources: Sequence[Any], places: Sequence[Any]
) -> Iterator[tuple[Any, list[Atoms], list[list[int]]]]:
    """(a program, its inputs' atoms per member, the numbers of each member's results)."""

    def slices(groups: list[list[int]]) -> list[Any]:
        outputs = ([jaxpr.outvars[i] for i in group] for group in groups)
        return [slice_of(jaxpr, jaxpr.eqns, sources, wanted) for wanted in outputs]

    def size(result: int) -> int:
        return _device_bytes(jaxpr.outvars[result].aval, places[result])

    groups = _groups(jaxpr)
    parts = slices(groups)
    if sum(len(part.eqns) for part in parts) > _REPEATED * len(jaxpr.eqns):
        # A chain through all of them, as of keys that are split one after another.
        groups = _joined(
            [[i] for i in range(len(places))],
            lambda i: size(i) if in_host(places[i]) else 0,
            _HOST_BYTES,
        )
        parts = slices(groups)
    alike, alone = defaultdict(list), []
    for group, part in zip(groups, parts, strict=True):
        computation = tuple((e.primitive.name, str(e.outvars[0].aval)) for e in part.eqns)
        out = tuple((str(v.aval), places[i]) for v, i in zip(part.outvars, group, strict=True))
        alike[computation, out].append((group, part))
    for members in alike.values():
        while members:
            others = []
            while True:
                try:
                    merged, atoms = merge_programs([part for _, part in members])
                    break
                except DifferentProgram as different:
                    others.append(members.pop(different.number))
            if len(members) > 1:
                yield merged, atoms, [group for group, _ in members]
            else:
                alone.append(members[0][0])
            members = others
    for group in _joined(alone, size, min(_JOINED_BYTES, _HOST_BYTES)):
        merged, atoms = merge_programs(slices([group]))
        yield merged, atoms, [group]


_COMPILED: dict[Any, list[tuple[Any, Callable[..., Any]]]] = {}  # (program, its jit), by its kind
_MOST_COMPILED = 64  # kinds


def _compiled(program: Any, places: tuple[Any, ...], ahead: bool) -> Callable[..., Any]:
    """The program, compiled `ahead` or by its first call, or an equal one of an earlier call."""
    inputs = tuple((v.aval.shape, v.aval.dtype) for v in program.invars)
    kind = inputs, places, ahead, tuple(eqn.primitive.name for eqn in program.eqns)
    for earlier, its_run in _COMPILED.get(kind, ()):
        try:
            _, atoms = merge_programs([earlier, program])
        except DifferentProgram:
            continue
        if len(atoms) == len(inputs):  # otherwise they differ in a literal
            return its_run
    run: Callable[..., Any] = jax.jit(
        as_function(program),
        out_shardings=list(places),
        compiler_options=init_options(places[0]),
    )
    if ahead:
        shapes = [jax.ShapeDtypeStruct(*shape_and_dtype) for shape_and_dtype in inputs]
        run = compile_in_background(run, *shapes)
    # Arrays within would stay in memory, and functions of Python are compared by name alone.
    constants = any(True for eqn in program.eqns for _ in nested_constants(eqn))
    if not constants and " at 0x" not in str(program):
        if len(_COMPILED) == _MOST_COMPILED and kind not in _COMPILED:
            _COMPILED.pop(next(iter(_COMPILED)))
        _COMPILED.setdefault(kind, []).append((program, run))
    return run


def _groups(jaxpr: Any) -> list[list[int]]:
    """The numbers of the results, grouped where they share the computation of a large array."""
    joined: dict[Any, Any] = {}

    def root(variable: Any) -> Any:
        while variable in joined:
            variable = joined[variable]
        return variable

    computed: set[Any] = set()
    for eqn in jaxpr.eqns:
        read = [v for v in eqn.invars if is_var(v) and v in computed and _size(v) > _SMALL]
        if read or any(_size(v) > _SMALL for v in eqn.outvars):
            first, *others = dict.fromkeys(map(root, [*read, *eqn.outvars]))
            joined.update(dict.fromkeys(others, first))
        computed.update(eqn.outvars)
    groups = defaultdict(list)
    for i, v in enumerate(jaxpr.outvars):
        groups[root(v) if is_var(v) else i].append(i)
    return list(groups.values())


def _joined(groups: list[list[int]], size: Callable[[int], int], most: int) -> list[list[int]]:
    """Groups of results joined in turn, to groups of bounded bytes."""
    joined, total = defaultdict[int, list[int]](list), 0
    for group in groups:
        joined[total // most] += group
        total += sum(map(size, group))
    return list(joined.values())


class _IntegersFolded(Rewriter[None]):
    """Evaluates the small integers that depend on no input: counters of keys.

    Only integers: a float may be rounded otherwise on the device.
    """

    enters = ()

    def other(self, program: Rewriting[None], eqn: jex.JaxprEqn) -> list[None]:
        operands = [program.atom(v) for v in eqn.invars]
        constant = bool(operands) and not any(map(is_var, operands)) and not eqn.effects
        if constant and all(_is_small_integer(v) for v in eqn.outvars):
            inner = sub_jaxpr(program.jaxpr, [eqn.replace(invars=operands)], [], eqn.outvars)
            with jax.ensure_compile_time_eval():
                values = jax.core.eval_jaxpr(inner, [])
            pairs = zip(eqn.outvars, values, strict=True)
            program.replace(eqn.outvars, [jex.Literal(np.asarray(x), v.aval) for v, x in pairs])
        else:
            program.emit(eqn)
        return [None] * len(eqn.outvars)


def _is_small_integer(variable: Any) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.integer)) and _size(variable) <= _SMALL


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _device_bytes(array: Any, place: Any) -> int:
    return math.prod(place.shard_shape(array.shape)) * int(array.dtype.itemsize)
