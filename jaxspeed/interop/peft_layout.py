"""The modules of a PEFT adapter: which of its tensors are which factors of ours, in which layout.

A weight `P` of ours has the factors `lora/P/A` [*stack, *in, r] and `lora/P/B` [*stack, r, *out],
and with DoRA `lora/P/magnitude` [*stack, *out]. PEFT has for a module M, which its keys name after
`base_model.model.`:

| M is a | `M.lora_A.weight` | `M.lora_B.weight` | `M.lora_magnitude_vector` |
|---|---|---|---|
| linear layer | [r, in] | [out, r] | [out] |
| convolution | [r, in, *window] | [out, r, 1, ..] | [1, out, 1, ..] |
| embedding | `M.lora_embedding_A` [r, vocab] | `M.lora_embedding_B` [out, r] | [out] |
| parameter | [experts r, in] | [out, r experts] | none: PEFT has no DoRA of parameters |

A parameter (`target_parameters`) has the keys of its module M; where several of one module are
adapted, those of the last one, and the others are in `M.base_layer`, `M.base_layer.base_layer`, ...

The layouts are derived from the rule that the model's mapping table has for the weight: a tensor's
dims are those of inputs and those of outputs, and the rank takes the place of either. A model
without a table has one rule for each weight: its path with dots, which names a parameter. All of
its stacked dims are then "experts".

Several weights of ours may be one module there (`c_attn` of GPT-2, `qkv_proj` of Phi-3). Its rank
is the sum of its parts' ranks: A has theirs one after another, and B is zero but for the outputs of
each part at the ranks of that part. Its scale is that of the first part, so its alpha is that of
the part times the module's rank over the part's (with rsLoRA times the root of this); a part of
another scale has its B multiplied. The file's metadata has the ranks and alphas of the parts. An
adapter that was trained in PEFT has one A for such a module, which all of its parts get; parts
whose A are equal, as after reading one, are written so again. DoRA's magnitudes belong to outputs,
so they are concatenated; that of a part that is not adapted is the norm of its weights.

A weight that is embedding and head at once has one adapter here, and in PEFT one in each module:
the head's A is the embedding's B, transposed, and the other way round. DoRA has no such form: it
measures a row there and a column here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxspeed.adapters.products import factor_shapes
from jaxspeed.errors import PretrainedError
from jaxspeed.interop.mapping import MappingTable, TensorRule, TensorShare, bind, matches
from jaxspeed.jaxpr.weight_uses import Kind, WeightDims
from jaxspeed.placement.paths import listed

PREFIX = "base_model.model."
FOLDER = "lora/"  # begins the paths of adapters' leaves
A, B, MAGNITUDE = range(3)
TENSORS = "adapter_model.safetensors"
PARTS = "jaxspeed_parts"  # in its metadata: (rank, alpha) of each part of a module in blocks
LEAVES = ("A", "B", "magnitude")
_RANK = "lora_rank"
_WEIGHT = ".weight"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModulePart:
    """What one weight of ours is of a module of theirs."""

    path: str
    stack: tuple[int | slice, ...]  # its place in the stacked dims; a slice: experts
    shares: tuple[TensorShare, TensorShare, TensorShare]  # of the factors of rank 1


@dataclass(frozen=True)
class AdaptedModule:
    """A module of theirs, or a parameter, and the weights of ours that it consists of."""

    name: str  # as PEFT matches it: without `.weight`, or with the parameter's name
    kind: str  # of the rule: "linear", "conv1d", "embedding"; or "parameter"
    keys: tuple[str, str, str]
    shapes: tuple[Shape, Shape, Shape]  # of rank 1
    experts: int
    parts: tuple[ModulePart, ...]

    def shape(self, which: int, rank: int) -> Shape:
        """The shape of a tensor: the rank is the first dim of A and the second one of B."""
        shape = list(self.shapes[which])
        if which != MAGNITUDE:
            shape[which] *= rank
        return tuple(shape)

    def view(self, which: int, part: ModulePart, tensor: np.ndarray, ranks: slice) -> np.ndarray:
        """Where a tensor of theirs has a part's factor, [*in, r], [r, *out] or [*out].

        Composite dims of ours are factored; `ranks` are those of the part in the module.
        """
        share = part.shares[which]
        if which == MAGNITUDE:
            return share.view(tensor.reshape([n for n in tensor.shape if n != 1] or [1]))
        rank = tensor.shape[which] // self.experts
        others = tensor.size // max(1, rank * self.experts)
        split = (self.experts, rank, others) if which == A else (others, rank, self.experts)
        chosen = tensor.reshape(split)[:, ranks]
        numbers = len(share.factors) - 1 - sum(isinstance(n, slice) for n in part.stack)
        at = len(share.factors) - 1 - numbers if which == A else numbers
        factors = (*share.factors[:at], chosen.shape[1], *share.factors[at + 1 :])
        return replace(share, factors=factors).view(chosen)


def dims_of(
    rule: TensorRule, weight: Shape, fits: Callable[[WeightDims], bool] | None = None
) -> WeightDims | None:
    """The dims of a weight, by the kind of its rule unless these do not fit; None: it has none."""
    theirs, ours = rule.dims(weight)
    numbers = set(rule.stacked)
    inside = [[name for name in dim if name not in ("1", "part")] for dim in theirs]
    inside = [dim for dim in inside if dim]
    experts = len(inside) - 2 if is_parameter(rule) else 0
    first = {name for dim in inside[: max(0, experts)] for name in dim}
    stack = sum(numbers.union(first).issuperset(dim) for dim in ours)
    inside = inside[max(0, experts) :]
    if len(inside) < 2:
        return None
    others = range(stack, len(ours))
    begin = tuple(i for i in others if set(inside[0]).issuperset(ours[i]))
    usual = begin if rule.kind != "linear" else tuple(i for i in others if i not in begin)
    subsets = (itertools.combinations(others, n) for n in range(1, len(others)))
    for inputs in (usual, *itertools.chain(*subsets)):
        outputs = tuple(i for i in others if i not in inputs)
        kind: Kind = "lookup" if rule.kind == "embedding" else "product"
        dims = WeightDims(tuple(range(stack)), inputs, outputs, kind)
        if fits is None or fits(dims):
            return dims
    return None


def is_parameter(rule: TensorRule) -> bool:
    """Whether PEFT adapts it as a parameter, and not as the weight of a module."""
    return not rule.tensor.endswith(_WEIGHT)


def path_table(weights: Iterable[str], stacks: Mapping[str, int]) -> MappingTable:
    """A table for a model that has none: a path with dots, and of adapted weights the numbers.

    `stacks` has the number of stacked dims of these.
    """

    def rule(path: str) -> TensorRule:
        if path not in stacks:
            return TensorRule(path.replace("/", "."), path)
        numbers = (f"{{stack{i}}}" for i in range(stacks[path]))
        return TensorRule(".".join([path.replace("/", "."), *numbers]) + _WEIGHT, path)

    return MappingTable([rule(path) for path in weights])


def modules_of(
    table: MappingTable, weights: Mapping[str, Shape], dims: Mapping[str, WeightDims]
) -> list[AdaptedModule]:
    """The modules of the weights that have `dims`, in the order of the table, each complete."""
    modules = []
    for rule in table.rules:
        for _, paths in matches(rule, weights):
            if adapted := [path for path in paths if path in dims]:
                modules += _modules(rule, paths, weights, dims[adapted[0]])
    inner: dict[str, str] = {}  # the keys of a module's parameters, from the last one inwards
    for i, module in reversed([*enumerate(modules)]):
        if module.kind == "parameter":
            owner = module.name.rpartition(".")[0]
            within = inner.get(owner, f"{PREFIX}{owner}")
            inner[owner] = f"{within}.base_layer"
            modules[i] = replace(module, keys=_keys(within, module.kind))
    return modules


def head_of(embedding: AdaptedModule, head: str) -> AdaptedModule:
    """The module of a tied head, of which the factors are the embedding's, transposed."""
    name = head.removesuffix(_WEIGHT)
    a, b, _ = embedding.shapes
    shapes = (b[::-1], a[::-1], (a[1],))
    return AdaptedModule(name, "linear", _keys(f"{PREFIX}{name}", "linear"), shapes, 1, ())


def _keys(module: str, kind: str) -> tuple[str, str, str]:
    magnitude = f"{module}.lora_magnitude_vector"
    if kind == "embedding":
        return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B", magnitude
    return f"{module}.lora_A{_WEIGHT}", f"{module}.lora_B{_WEIGHT}", magnitude


def _modules(
    rule: TensorRule,
    paths: Sequence[str],
    weights: Mapping[str, Shape],
    dims: WeightDims,
) -> list[AdaptedModule]:
    """The modules of one use of a rule, one for each number."""
    if rule.scale != 1:
        raise PretrainedError(
            f"adapters of {listed(paths)} cannot be in files: there the weights are {rule.scale:g} "
            "times the model's"
        )
    theirs, ours = rule.dims(weights[paths[0]])
    stack, inputs, outputs = (
        [ours[dim] for dim in of] for of in (dims.stack, dims.inputs, dims.outputs)
    )
    names_in = set(itertools.chain(*inputs))
    experts = [name for dim in stack for name in dim if name not in rule.stacked]
    inside = [dim for dim in theirs if dim != ["1"] and not set(dim) <= set(experts)]
    file_in = [dim for dim in inside if names_in.issuperset(dim)]
    file_out = [dim for dim in inside if dim not in file_in]
    if len(file_out) > 1:  # of a model without a table
        file_out = [list(itertools.chain(*file_out))]
    window = [["1"]] * (len(file_in) - 1)
    rank = [_RANK]

    def text(left: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> str:
        sides = (" ".join(f"({' '.join(dim)})" for dim in side) for side in (left, right))
        return " -> ".join(sides)

    layouts = (
        text([[*experts, *rank], *file_in], [*stack, *inputs, rank]),
        text([*file_out, [*rank, *experts], *window], [*stack, rank, *outputs]),
        text([*([name] for name in experts), *window[:1], *file_out, *window], [*stack, *outputs]),
    )
    shapes = {
        path: (
            *factor_shapes(weights[path], dims, 1),
            tuple(weights[path][dim] for dim in (*dims.stack, *dims.outputs)),
        )
        for path in paths
    }
    shares: dict[str, dict[str, list[TensorShare]]] = {}
    tensors: dict[str, list[Shape]] = {}
    for which, layout in enumerate(layouts):
        # A is not fused: each part has its ranks of it.
        groups = [(path,) for path in paths] if which == A else [tuple(paths)]
        for group in groups:
            changed = replace(rule, paths=group, layout=layout, kind="linear")
            bound = bind(MappingTable([changed]), {path: shapes[path][which] for path in group})
            for path, pieces in bound.pieces.items():
                for piece in pieces:
                    shares.setdefault(piece.tensor, {}).setdefault(path, []).append(piece)
            if group[0] == paths[0]:
                for name, shape in bound.tensors.items():
                    tensors.setdefault(name, []).append(shape)
    kind = "parameter" if is_parameter(rule) else rule.kind
    modules = []
    for tensor, of_paths in shares.items():
        name = tensor.removesuffix(_WEIGHT)
        parts = []
        for path in paths:
            of_a, of_b, of_magnitude = of_paths[path]
            place = tuple(slice(None) if n is None else n for n in of_a.at[: len(stack)])
            parts.append(ModulePart(path, place, (of_a, of_b, of_magnitude)))
        count = math.prod(
            n for n, at in zip(weights[paths[0]], parts[0].stack) if at == slice(None)
        )
        a, b, magnitude = tensors[tensor]
        keys = _keys(f"{PREFIX}{name}", kind)
        modules.append(AdaptedModule(name, kind, keys, (a, b, magnitude), count, tuple(parts)))
    return modules


def rank_spans(ranks: Sequence[int], total: int) -> list[slice]:
    """The ranks of each part among those of its module: one after another, or shared by all."""
    if sum(ranks) != total:
        return [slice(0, total) for _ in ranks]
    ends = list(itertools.accumulate(ranks))
    return [slice(end - rank, end) for rank, end in zip(ranks, ends, strict=True)]


def relative_scales(parts: Sequence[tuple[int, float]], rslora: bool) -> list[float]:
    """The scale of each part (rank, alpha) relative to the first one's, which is the module's."""
    scales = [alpha / (math.sqrt(rank) if rslora else rank) if rank else 0 for rank, alpha in parts]
    first = next((scale for scale in scales if scale), 1)
    return [scale / first if scale else 1.0 for scale in scales]


def ranks_of(which: int, part: ModulePart, rank: int) -> tuple[Any, ...]:
    """Where a part's factor, with its numbers in the stack given, has the first ranks."""
    experts = sum(isinstance(number, slice) for number in part.stack)
    if which == A:
        return (..., slice(0, rank))
    return (*[slice(None)] * experts, slice(0, rank)) if which == B else ()
