"""Flops that all data ranks compute redundantly, by a uniformity analysis of the compiled program.

For each value of the program for one device, the analysis finds the mesh axes along which it may
vary from device to device. An argument varies along the axes that shard it, the partition id along
all. An operation's result varies along the axes of its operands; an all-reduce or all-gather
removes its axes, a reduce-scatter, all-to-all or permute adds them. Loops are iterated to a fixed
point. Small integer arrays computed from the partition id (the offset of a device's slice, which
XLA looks up in a table) are evaluated for every device; otherwise a slice of a tensor-parallel
weight would count as varying along data.

A matmul that does not vary along a data axis is replicated along it. Unknown values count as
varying, so the result is a lower bound. Recomputation for the backward pass is not replication: its
inputs vary as they did in the forward pass.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jaxspeed.hlo.cost import own_flops
from jaxspeed.hlo.parser import Computation, Instruction, Module, parse
from jaxspeed.hlo.replica_groups import axes_of, replica_groups, source_target_pairs, tiles_of
from jaxspeed.hlo.trip_counts import walk
from jaxspeed.ops.free_axes import free_sample_axes
from jaxspeed.placement.specs import spec_axes

Axes = frozenset[str]
Known = tuple[tuple[int, ...], ...]  # the elements of a small integer array, for every device
Tree = Any  # a VaryingValue, or a tuple of trees for a tuple

MOST_KNOWN = 1 << 16  # limit on the evaluated elements of all devices
_ALIKE = ("all-reduce", "all-gather", "collective-broadcast", "ragged-all-gather")
_APART = ("reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_OF_A_DEVICE = ("partition-id", "replica-id", "rng", "rng-get-and-update-state", "infeed", "recv")
_PASSED_THROUGH = ("copy", "bitcast", "reshape", "convert", "opt-barrier", "async-update")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": lambda a, b: a // np.maximum(b, 1),
    "remainder": lambda a, b: a % np.maximum(b, 1),
    "minimum": np.minimum,
    "maximum": np.maximum,
}


@dataclass(frozen=True)
class VaryingValue:
    """Knowledge of one array: the axes along which it may vary, and its elements if few."""

    axes: Axes
    known: Known | None = None


def replicated_flops(
    program: str | Module, mesh: Mesh | AbstractMesh, arguments: Sequence[Sharding] = ()
) -> int:
    """A device's flops, times loop trip counts, that other data ranks compute as well.

    `arguments` are the shardings of the program's parameters, which jaxlib 0.12 does not print.
    """
    data = set(free_sample_axes(mesh=mesh))
    module = parse(program)
    if not data or module.devices == 1:
        return 0
    flow = _Flow(module, mesh, arguments)
    flow.visit(module.entry, [])
    total = 0
    for site in walk(module):
        flops = own_flops(site)
        if flops and not data <= _axes(flow.found[site.instruction.name]):
            total += flops * site.runs
    return total


class _Flow:
    """The analysis: `found` holds each instruction's value, joined over all its callers."""

    def __init__(
        self, module: Module, mesh: Mesh | AbstractMesh, arguments: Sequence[Sharding] = ()
    ) -> None:
        self.module, self.mesh, self.arguments = module, mesh, arguments
        self.found: dict[str, Tree] = {}

    def visit(self, computation: Computation, args: Sequence[Tree]) -> Tree:
        """The value of a computation's root for these arguments."""
        values: dict[str, Tree] = {}
        for name, instruction in computation.instructions.items():
            if instruction.opcode == "parameter" and args:
                value = args[int(instruction.arguments)]
            else:
                operands = [values[operand] for operand in instruction.operands]
                value = self._value(instruction, operands)
            values[name] = value
            self.found[name] = _join(self.found.get(name, value), value)
        return values[computation.root.name]

    def _value(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        opcode = instruction.opcode
        if opcode == "parameter":
            return VaryingValue(self._sharded_over(instruction))
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            index = int(instruction.attribute("index") or 0)
            return operands[0][index] if isinstance(operands[0], tuple) else operands[0]
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode in ("fusion", "call", "async-start"):
            called = instruction.called("to_apply" if opcode == "call" else "calls")
            return self.visit(self.module.computations[called[0]], operands)
        if opcode == "conditional":
            return self._branches(instruction, operands)
        if opcode in _PASSED_THROUGH or opcode.endswith("-done"):
            return operands[0]
        kind = opcode.removesuffix("-start")
        axes = frozenset().union(*map(_axes, operands))
        if kind in _ALIKE or kind in _APART:
            return VaryingValue(self._communicated(instruction, kind, axes))
        known = self._known(instruction, operands)
        if known is not None:
            return VaryingValue(self._varies(known), known)
        return VaryingValue(self._all if opcode in _OF_A_DEVICE else axes)

    @cached_property
    def _all(self) -> Axes:
        return frozenset(str(name) for name, size in self.mesh.shape.items() if size > 1)

    def _loop(self, loop: Instruction, carried: Tree) -> Tree:
        body = self.module.computations[loop.called("body")[0]]
        while True:
            after = _join(carried, self.visit(body, [carried]))
            if after == carried:
                break
            carried = after
        self.visit(self.module.computations[loop.called("condition")[0]], [carried])
        return carried

    def _branches(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        keys = ("branch_computations", "true_computation", "false_computation")
        names = [name for key in keys for name in instruction.called(key)]
        joined: Tree = VaryingValue(_axes(operands[0]))
        for name, operand in zip(names, operands[1:], strict=True):
            joined = _join(joined, self.visit(self.module.computations[name], [operand]))
        return joined

    def _communicated(self, instruction: Instruction, kind: str, axes: Axes) -> Axes:
        if kind == "collective-permute":
            groups = source_target_pairs(instruction.attribute("source_target_pairs") or "{}")
        else:
            text = instruction.attribute("replica_groups") or "{}"
            groups = replica_groups(text, self.module.devices)
        among = axes_of(groups, self.mesh)
        if kind in _APART:
            return axes | {*among}
        full_axes = len(groups[0]) == math.prod(self.mesh.shape[axis] for axis in among)
        return axes - {*among} if full_axes else axes

    def _sharded_over(self, parameter: Instruction) -> Axes:
        """The axes that shard an argument of the program; all if its sharding is unknown."""
        number = int(parameter.arguments)
        known = self.arguments[number] if number < len(self.arguments) else None
        if isinstance(known, NamedSharding):
            return spec_axes(known.spec) & self._all
        tiles = tiles_of(parameter.attribute("sharding") or "", self.mesh.size)
        return self._all if tiles is None else self._varies([(tile,) for tile in tiles])

    def _varies(self, known: Sequence[Sequence[int]]) -> Axes:
        """The axes along which elements differ from device to device."""
        grid = np.asarray(known).reshape(*self.mesh.shape.values(), -1)
        names = map(str, self.mesh.shape)
        return frozenset(
            name for dim, name in enumerate(names) if (grid != grid.take([0], axis=dim)).any()
        )

    def _known(self, instruction: Instruction, operands: list[Tree]) -> Known | None:
        """The elements of a small integer array on every device, if they can be evaluated."""
        opcode, devices = instruction.opcode, self.mesh.size
        if opcode == "partition-id":
            return tuple((device,) for device in range(devices))
        if opcode == "constant":
            return self._constant(instruction)
        operand_values = [value.known for value in operands if isinstance(value, VaryingValue)]
        if (
            len(operand_values) != len(operands)
            or not operand_values
            or any(rows is None for rows in operand_values)
        ):
            return None
        arrays = [np.asarray(rows) for rows in operand_values]
        if opcode == "dynamic-slice" and len(arrays) == 2:
            table, start = arrays
            size = instruction.arrays[0].elements
            first = np.clip(start, 0, table.shape[1] - size)
            return _rows(np.take_along_axis(table, first + np.arange(size), axis=1))
        if opcode in _ARITHMETIC and len(arrays) == 2:
            return _rows(_ARITHMETIC[opcode](*arrays))
        return None

    def _constant(self, instruction: Instruction) -> Known | None:
        (shape,) = instruction.arrays[:1]
        if shape.dtype[0] not in "su" or len(shape.dims) > 1 or "..." in instruction.arguments:
            return None
        elements = tuple(map(int, re.findall(r"-?\d+", instruction.arguments)))
        if len(elements) != shape.elements or len(elements) * self.mesh.size > MOST_KNOWN:
            return None
        return (elements,) * self.mesh.size


def _rows(array: np.ndarray) -> Known:
    return tuple(tuple(map(int, row)) for row in array)


def _leaves(tree: Tree) -> Iterator[VaryingValue]:
    for part in tree if isinstance(tree, tuple) else ():
        yield from _leaves(part)
    if isinstance(tree, VaryingValue):
        yield tree


def _axes(tree: Tree) -> Axes:
    parts: Iterable[Axes] = (value.axes for value in _leaves(tree))
    return frozenset().union(*parts)


def _join(a: Tree, b: Tree) -> Tree:
    """The knowledge common to both."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(map(_join, a, b))
    if isinstance(a, VaryingValue) and a == b:
        return a
    return VaryingValue(_axes(a) | _axes(b))
