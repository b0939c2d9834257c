"""Mapping tables: which tensors of a file are which parameters, in which layout.

A table is a list of rules and is used in both directions. A rule has a tensor's name, a
parameter's path and a layout in einops' notation, the file's dims first:

    TensorRule("h.{layer}.attn.c_attn.weight",
         ("blocks/attn/q_proj/kernel", "blocks/attn/k_proj/kernel", "blocks/attn/v_proj/kernel"),
         "embed (part heads dim) -> layer embed heads dim")

- `{layer}` stands for a number. Where the path has it too, each number has a parameter of its own;
  where the path lacks it, it is a dim of one stacked parameter, which the layout names.
- `(heads dim)` is one dim of several factors, the slowest first; `1` is a tensor's dim of size 1.
- Several paths share one fused tensor: `part` concatenates them along the factors of its dim that
  follow it, in which they may differ in size, for each of those before it.
- Without a layout the dims are equal, after those of stacked numbers.
- `sizes` has the sizes of factors that a parameter has not as a dim of its own.
- `scale` is the number by which the tensor is the parameter's multiple.
- `first` has the numbers in the tensors' names that are 0 in the parameter, where they are not 0.
- `kind` says which dims of a weight are inputs, which the files of adapters need: in an "embedding"
  and a "conv1d" they are first, in all others ("linear", convolutions too) the outputs are.

A rule whose path the model lacks is inactive: one table serves models with and without biases.

Each use of a rule is a `TensorShare`, which turns a file's array into a *view* of it in the
parameter's layout: reading is `value[...] = view`, writing is `view[...] = value`.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxspeed.errors import PretrainedError

Index = tuple[slice, ...]
_PART = "part"
_NUMBER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class TensorRule:
    """The parameters that one tensor (or one per number) of a file holds, and their layout."""

    tensor: str
    paths: str | tuple[str, ...]
    layout: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    kind: Literal["linear", "conv1d", "embedding"] = "linear"
    first: Mapping[str, int] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def stacked(self) -> list[str]:
        """The numbers that are dims of the parameter."""
        first = self.paths if isinstance(self.paths, str) else self.paths[0]
        inside = _NUMBER.findall(first)
        return [n for n in dict.fromkeys(_NUMBER.findall(self.tensor)) if n not in inside]

    def dims(self, shape: tuple[int, ...]) -> tuple[list[list[str]], list[list[str]]]:
        """The dims of the tensor, and those of a parameter of this shape, each as its factors."""
        if not self.layout:
            unstacked = [[f"dim{i}"] for i in range(len(shape) - len(self.stacked))]
            return unstacked, [*([name] for name in self.stacked), *unstacked]
        left, arrow, right = self.layout.partition("->")
        if not arrow:
            raise _Misfit(f"layout {self.layout!r} has no '->'")
        file_dims, dims = _factors(left), _factors(right)
        if len(dims) != len(shape):
            raise _Misfit(f"layout {self.layout!r} has {len(dims)} dims, the parameter {shape}")
        return file_dims, dims


@dataclass(frozen=True)
class MappingTable:
    """The rules of a model.

    Args:
      ignored: patterns of tensors that a file may have and that are not read, such as buffers.
      prefix: of names that start with it: files of the bare model, which lack it, are read too.
      tied: tensors that are the same as another one, {name: the other's}. A file may have them too.
      modules: where transformers 5 names modules otherwise in memory than in files, as adapters do:
        {a tensor's name in rules, without its last part: the module's}.
      memory: the table of these names where they hold other parts too, such as all experts.
      variables: paths that are no parameters: they keep their dtype.
      unread: modules in memory whose weights are variables, which adapters must not name.
    """

    rules: Sequence[TensorRule]
    ignored: Sequence[str] = ()
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    memory: MappingTable | None = None
    variables: Sequence[str] = ()
    unread: Sequence[str] = ()

    def in_memory(self) -> MappingTable:
        """The table with the names that modules have in memory."""
        if self.memory is not None:
            return self.memory

        def renamed(rule: TensorRule) -> TensorRule:
            module, _, last = rule.tensor.rpartition(".")
            return replace(rule, tensor=f"{self.modules.get(module, module)}.{last}".lstrip("."))

        return replace(self, rules=[renamed(rule) for rule in self.rules], modules={})

    def ignores(self, name: str) -> bool:
        names = (name, f"{self.prefix}{name}")
        if not self.tied.keys().isdisjoint(names):
            return True
        return any(_pattern(regex).fullmatch(n) for regex in self.ignored for n in names)


@dataclass(frozen=True)
class TensorShare:
    """One tensor's share of one parameter."""

    tensor: str
    at: tuple[int | None, ...]  # of the parameter's dims: a stacked one's number, None: all of it
    shape: tuple[int, ...]  # of the parameter's other dims
    part: tuple[int, int, slice] | None  # of a fused one: dim, its factors before, range in each
    factors: tuple[int, ...]  # of the tensor's dims
    order: tuple[int, ...]  # of the factors, as the parameter has them
    scale: float = 1.0  # of the tensor

    def view(self, array: np.ndarray) -> np.ndarray:
        """The tensor in the parameter's layout; composite dims of the parameter are factored."""
        if self.part is not None:
            dim, before, span = self.part
            array = array.reshape(*array.shape[:dim], before, -1, *array.shape[dim + 1 :])
            array = array[(slice(None),) * (dim + 1) + (span,)]
        return array.reshape(self.factors).transpose(self.order)

    def within(self, index: Index) -> tuple[Any, Index] | None:
        """(where in a block of the parameter, which part of the piece); None: not in the block."""
        where: list[Any] = []
        inner: list[slice] = []
        for span, number in zip(index, self.at, strict=True):
            if number is None:
                where.append(slice(None))
                inner.append(span)
            elif span.start <= number < span.stop:
                where.append(number - span.start)
            else:
                return None
        return tuple(where), tuple(inner)

    def read(self, array: np.ndarray, index: Index, into: np.ndarray) -> None:
        """Copy what a block of the parameter has of this tensor."""
        if overlap := self.within(index):
            where, inner = overlap
            view = self.view(array)
            view = view if view.ndim == len(self.shape) else view.reshape(self.shape)
            into[where] = view[inner] if self.scale == 1 else view[inner] / self.scale

    def write(self, array: np.ndarray, index: Index, block: np.ndarray) -> None:
        """The reverse of `read`."""
        if overlap := self.within(index):
            where, inner = overlap
            view, values = self.view(array), block[where]
            values = values if self.scale == 1 else values * self.scale
            if view.ndim == len(self.shape):
                view[inner] = values
            else:  # a composite dim cannot be a view
                full = view.reshape(self.shape)
                full[inner] = values
                view[...] = full.reshape(view.shape)


@dataclass(frozen=True)
class Bound:
    """A table applied to a model's parameters."""

    pieces: Mapping[str, Sequence[TensorShare]]  # by path
    tensors: Mapping[str, tuple[int, ...]]  # the shape of each, by name
    table: MappingTable

    def renamed(self, form: str) -> Bound:
        """The same with other names of the tensors, as `state.{}.exp_avg`."""
        pieces = {
            path: [replace(piece, tensor=form.format(piece.tensor)) for piece in of_path]
            for path, of_path in self.pieces.items()
        }
        return Bound(pieces, {form.format(n): x for n, x in self.tensors.items()}, self.table)


def bind(
    table: MappingTable, parameters: Mapping[str, tuple[int, ...]], most: float = math.inf
) -> Bound:
    """Apply a table to parameters, given as shapes by path; `most` tensors at most by one rule.

    Raises:
      PretrainedError: parameters without a rule or with two, layouts that do not fit.
    """
    pieces: dict[str, list[TensorShare]] = {path: [] for path in parameters}
    tensors: dict[str, tuple[int, ...]] = {}
    owners: dict[str, TensorRule] = {}
    problems: list[str] = []
    for rule in table.rules:
        try:
            for numbers, paths in matches(rule, parameters):
                for path in paths:
                    if owners.setdefault(path, rule) is not rule:
                        problems.append(
                            f"parameter {path} has two rules: {owners[path].tensor!r} and "
                            f"{rule.tensor!r}"
                        )
                for name, shape, shares_of in _applied(rule, numbers, paths, parameters, most):
                    if name in tensors:
                        problems.append(f"tensor {name} has two rules")
                    tensors[name] = shape
                    for path, piece in shares_of.items():
                        pieces[path].append(piece)
        except _Misfit as misfit:
            problems.append(f"rule {rule.tensor!r}: {misfit}")
    known = [path for rule in table.rules for path in _paths(rule)]
    unruled = [path for path in parameters if path not in owners]
    if unruled and not problems:
        problems = [f"parameter {p} has no rule{_nearest(p, known)}" for p in unruled]
    if problems:
        raise PretrainedError(f"the mapping table does not fit the model:{lines(problems)}")
    return Bound(pieces, tensors, table)


def identity(parameters: Mapping[str, tuple[int, ...]]) -> Bound:
    """Tensors named and shaped as the parameters."""
    return bind(MappingTable([TensorRule(path, path) for path in parameters]), parameters)


def check_tensors(bound: Bound, there: Mapping[str, tuple[int, ...]], where: str) -> dict[str, str]:
    """{name in the table: name in the file} of all tensors.

    Raises:
      PretrainedError: lists what is missing, left over or of a wrong shape, with nearest names.
    """
    table = bound.table
    prefix = table.prefix
    if prefix and not any(name.startswith(prefix) for name in there):
        names = {n: n.removeprefix(prefix) for n in bound.tensors}
    else:
        names = {n: n for n in bound.tensors}
    wanted = set(names.values())
    left = [n for n in there if n not in wanted and not table.ignores(n)]
    missing = [n for n in names.values() if n not in there]
    problems = [f"{n} is missing{_nearest(n, left or list(there))}" for n in missing]
    problems += [f"{n} {list(there[n])} is left over{_nearest(n, missing)}" for n in left]
    for name, in_file in names.items():
        shape = bound.tensors[name]
        if in_file in there and there[in_file] != shape:
            problems.append(f"{in_file} has shape {list(there[in_file])}, expected {list(shape)}")
    if problems:
        raise PretrainedError(f"{where}: its tensors are not those of the model:{lines(problems)}")
    return names


def lines(problems: Sequence[str], most: int = 20) -> str:
    """Problems, one a line."""
    more = f"\n  ... and {len(problems) - most} more" if len(problems) > most else ""
    return "".join(f"\n  {problem}" for problem in problems[:most]) + more


# -- layouts ---------------------------------------------------------------------------------------


class _Misfit(Exception):
    """A rule does not fit a parameter."""


def _paths(rule: TensorRule) -> tuple[str, ...]:
    return (rule.paths,) if isinstance(rule.paths, str) else tuple(rule.paths)


def _pattern(name: str) -> re.Pattern[str]:
    seen: set[str] = set()
    parts = []
    for literal, number in _alternating(name):
        parts.append(re.escape(literal))
        if number:
            parts.append(f"(?P={number})" if number in seen else rf"(?P<{number}>\d+)")
            seen.add(number)
    return re.compile("".join(parts))


def _alternating(name: str) -> Iterable[tuple[str, str]]:
    split = _NUMBER.split(name)
    return itertools.zip_longest(split[::2], split[1::2], fillvalue="")


def matches(
    rule: TensorRule, parameters: Mapping[str, Any]
) -> Iterable[tuple[dict[str, int], tuple[str, ...]]]:
    """(the numbers in the paths, the paths) for each use of a rule."""
    first, *others = _paths(rule)
    pattern = _pattern(first)
    for path in parameters:
        if match := pattern.fullmatch(path):
            numbers = {name: int(number) for name, number in match.groupdict().items()}
            paths = (path, *(_named(other, numbers) for other in others))
            if absent := [other for other in paths if other not in parameters]:
                raise _Misfit(f"the model has {path} but not {absent[0]}")
            yield numbers, paths


def _named(name: str, numbers: Mapping[str, int]) -> str:
    return _NUMBER.sub(lambda match: str(numbers[match[1]]), name)


def _applied(
    rule: TensorRule,
    numbers: Mapping[str, int],
    paths: Sequence[str],
    parameters: Mapping[str, tuple[int, ...]],
    most: float,
) -> Iterable[tuple[str, tuple[int, ...], dict[str, TensorShare]]]:
    """(a tensor's name, its shape, {path: its piece}) for each number of stacked parameters."""
    stacked = rule.stacked
    shapes = [parameters[path] for path in paths]
    layouts = [_Layout.of(rule, shape) for shape in shapes]
    dims: list[int] = []
    fused, before = layouts[0].fused
    for sizes in zip(*(layout.dims for layout in layouts), strict=True):
        shares = {layout.fused for layout in layouts} if len(dims) == fused else set(sizes)
        if len(shares) > 1:
            raise _Misfit(f"{', '.join(paths)} have shapes {shapes}, which do not fit together")
        dims.append(sum(sizes) if len(dims) == fused else sizes[0])
    lengths = [[layout.sizes[name] for name in stacked] for layout in layouts]
    if math.prod(lengths[0]) > most:
        raise _Misfit(f"the model has {math.prod(lengths[0]):,} of it, the folder {most:,} tensors")
    for position in itertools.product(*map(range, lengths[0])):
        here = dict(zip(stacked, position, strict=True))
        in_name = {n: number + rule.first.get(n, 0) for n, number in here.items()}
        name = _named(rule.tensor, {**numbers, **in_name})
        start = 0
        pieces = {}
        for path, layout in zip(paths, layouts, strict=True):
            part = None
            if fused is not None and len(paths) > 1:
                length = layout.dims[fused] // before
                part = fused, before, slice(start, start := start + length)
            pieces[path] = layout.piece(name, here, part, rule.scale)
        yield name, tuple(dims), pieces


@dataclass(frozen=True)
class _Layout:
    """A rule's layout with the sizes of one parameter."""

    left: list[list[str]]  # the tensor's dims as factors, without `part`
    right: list[list[str]]  # the parameter's dims as factors
    sizes: dict[str, int]
    fused: tuple[int | None, int]  # the dim with `part`, the size of the factors before it

    @classmethod
    def of(cls, rule: TensorRule, shape: tuple[int, ...]) -> _Layout:
        file_dims, dims = rule.dims(shape)
        sizes = {**rule.sizes, "1": 1}
        for factors, size in zip(dims, shape, strict=True):
            if len(factors) == 1 and sizes.setdefault(factors[0], size) != size:
                raise _Misfit(f"{factors[0]} is {sizes[factors[0]]} and {size}")
        for factors, size in zip(dims, shape, strict=True):
            unknown = [name for name in factors if name not in sizes]
            known = math.prod(sizes[name] for name in factors if name in sizes)
            if len(unknown) > 1 or size % max(known, 1):
                raise _Misfit(f"{shape}: the factors ({' '.join(factors)}) of {size} are unknown")
            for name in unknown:
                sizes[name] = size // known
            if math.prod(sizes[name] for name in factors) != size:
                raise _Misfit(f"{shape}: the factors ({' '.join(factors)}) do not give {size}")
        inside = [n for n in itertools.chain(*file_dims) if n not in ("1", _PART)]
        outside = [*itertools.chain(*dims)]
        if sorted([*inside, *rule.stacked]) != sorted(outside) or len(set(outside)) < len(outside):
            raise _Misfit(f"layout {rule.layout!r}: its two sides have different dims")
        fused: tuple[int | None, int] = None, 1
        for i, factors in enumerate(file_dims):
            if _PART in factors:
                fused = i, math.prod(sizes[n] for n in factors[: factors.index(_PART)])
        split = [[n for n in factors if n != _PART] for factors in file_dims]
        return cls(split, dims, sizes, fused)

    @property
    def dims(self) -> list[int]:
        return [math.prod(self.sizes[name] for name in factors) for factors in self.left]

    def piece(
        self,
        tensor: str,
        stacked: Mapping[str, int],
        part: tuple[int, int, slice] | None,
        scale: float,
    ) -> TensorShare:
        factors = [name for dim in self.left for name in dim if name != "1"]
        inner = [dim for dim in self.right if dim[0] not in stacked]
        return TensorShare(
            tensor,
            at=tuple(stacked.get(dim[0]) for dim in self.right),
            shape=tuple(math.prod(self.sizes[name] for name in dim) for dim in inner),
            part=part,
            factors=tuple(self.sizes[name] for name in factors),
            order=tuple(factors.index(name) for dim in inner for name in dim),
            scale=scale,
        )


def _factors(text: str) -> list[list[str]]:
    """'(a b) c' as [['a', 'b'], ['c']]."""
    groups = re.findall(r"\(([^()]*)\)|([\w]+)", text)
    if re.sub(r"\([^()]*\)|\w+|\s", "", text):
        raise _Misfit(f"layout {text!r} is not understood")
    return [group.split() or [name] if group else [name] for group, name in groups]


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    return f" (nearest: {', '.join(close)})" if close else ""
