"""A model's adapters written as PEFT writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspeed.checkpoint.process_agreement import OnFirst
from jaxspeed.errors import CheckpointError, PretrainedError
from jaxspeed.interop.export_values import Values, full_array
from jaxspeed.interop.mapping import Bound, Index, MappingTable, TensorShare, bind, lines, matches
from jaxspeed.interop.peft_config import (
    CONFIG,
    SAVED_EMBEDDINGS,
    AdapterForm,
    WrittenModule,
    config_of,
    ends,
    saved_modules,
)
from jaxspeed.interop.peft_layout import (
    FOLDER,
    LEAVES,
    MAGNITUDE,
    PARTS,
    PREFIX,
    TENSORS,
    A,
    AdaptedModule,
    B,
    ModulePart,
    Shape,
    dims_of,
    head_of,
    is_parameter,
    modules_of,
    path_table,
    rank_spans,
    ranks_of,
    relative_scales,
)
from jaxspeed.interop.safetensors import Tensor, TensorFile, check_dtype
from jaxspeed.jaxpr.weight_uses import WeightDims
from jaxspeed.placement.paths import listed


class _Leaves:
    """Arrays that are written; those of one module's weights are in memory at a time."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._read: dict[str, np.ndarray] = {}
        self._of: tuple[str, ...] = ()

    def of(self, module: AdaptedModule, part: ModulePart, which: int) -> np.ndarray:
        """A part's factor, for its numbers in the stack."""
        path = f"{FOLDER}{part.path}/{LEAVES[which]}"
        return self._cached(module, path, partial(full_array, self._values, path))[part.stack]

    def norms(self, module: AdaptedModule, part: ModulePart, dims: WeightDims) -> np.ndarray:
        """The norms of a part's outputs: the magnitude of a weight that is not adapted."""

        def norms() -> np.ndarray:
            shape, _ = self._values.leaves[part.path]
            kept = [dim for dim in range(len(shape)) if dim not in dims.inputs]
            squares = np.zeros([shape[dim] for dim in kept])  # so exact that no block is seen
            for index, block in self._values.blocks(part.path):
                sums = np.square(block.astype(np.float64)).sum(axis=dims.inputs)
                squares[tuple(index[dim] for dim in kept)] += sums
            return np.sqrt(squares).astype(np.float32)

        return self._cached(module, part.path, norms)[part.stack]

    def _cached(
        self, module: AdaptedModule, name: str, make: Callable[[], np.ndarray]
    ) -> np.ndarray:
        if (paths := tuple(part.path for part in module.parts)) != self._of:
            self._of, self._read = paths, {}
        if name not in self._read:
            self._read[name] = make()
        return self._read[name]


def write_adapter(
    values: Values, out: str | Path, form: AdapterForm, dtype: str | None = None
) -> dict[str, Tensor]:
    """Write the adapters of a model to a folder; called on every process, of which one writes.

    The factors of one weight, or of those that are one module, are in memory at a time. Of the
    base nothing is read but the parameters that are saved.

    Returns:
      The tensors.

    Raises:
      CheckpointError: the folder cannot be written to, or has an adapter.
      PretrainedError: the mapping table is of another model, or modules have other inputs there.
    """
    target = Path(out)
    weights = {p: shape for p, (shape, _) in values.leaves.items() if not p.startswith(FOLDER)}
    dims = {path: adapter.dims for path, adapter in form.record.adapters.items()}
    if form.table is None:
        table = path_table(weights, {path: len(written.stack) for path, written in dims.items()})
    else:
        table = form.table.in_memory()
        _check_dims(table, weights, dims)
    bound, leaves = bind(table, weights), _Leaves(values)
    modules = [_written(module, leaves, form) for module in modules_of(table, weights, dims)]
    modules = [written for written in modules if written.rank]
    if form.section["use_dora"]:
        _refuse_dora_of_parameters(modules)
    heads = _tied_heads(table, modules, form)
    config = config_of(form, [*modules, *(head for head, _ in heads)], bound)
    saved = _saved(form, [*modules, *(head for head, _ in heads)], bound, config)
    tensors = {}
    for written in modules:
        first = _adapted(written)
        for which, key in zip(form.factors, written.module.keys, strict=False):
            stored = values.leaves[f"{FOLDER}{first.path}/{LEAVES[which]}"][1]
            tensors[key] = Tensor(key, written.module.shape(which, written.rank), dtype or stored)
    for head, embedding in heads:
        for which, other in ((A, B), (B, A)):
            key, shape = head.module.keys[which], head.module.shape(which, head.rank)
            tensors[key] = Tensor(key, shape, tensors[embedding.module.keys[other]].dtype)
    pieces = {
        path: [piece for piece in of if piece.tensor in saved] for path, of in bound.pieces.items()
    }
    for path, of in pieces.items():
        for piece in of:
            for key in saved[piece.tensor]:
                stored = dtype or values.leaves[path][1]
                tensors[key] = Tensor(key, bound.tensors[piece.tensor], stored)
    for tensor in tensors.values():
        check_dtype(tensor.name, tensor.dtype)
    wide_first = sorted(tensors.values(), key=lambda t: (-jnp.dtype(t.dtype).itemsize, t.name))
    tensors = {tensor.name: tensor for tensor in wide_first}
    in_blocks = {written.module.name: written.parts for written in modules if _in_blocks(written)}
    metadata = {"format": "pt", **({PARTS: json.dumps(in_blocks)} if in_blocks else {})}
    files: list[TensorFile] = []  # one, on the process that writes

    def create() -> None:
        target.mkdir(parents=True, exist_ok=True)
        if (target / TENSORS).exists() or (target / CONFIG).exists():
            raise CheckpointError(f"{target}: contains an adapter already")
        files.append(TensorFile.create(target / TENSORS, tensors, metadata))

    def write_heads() -> None:
        (file,) = files
        for head, embedding in heads:
            for which, other in ((A, B), (B, A)):
                of_embedding = file.array(embedding.module.keys[other])
                file.array(head.module.keys[which])[...] = of_embedding.T

    def write_block(
        keys: Sequence[tuple[TensorShare, str]], index: Index, block: np.ndarray
    ) -> None:
        for piece, key in keys:
            array = files[0].array(key)
            piece.write(array, index, block.astype(array.dtype, copy=False))

    def finish() -> None:
        files[0].finish(target / TENSORS)
        (target / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))

    on_first = OnFirst("writing an adapter")
    try:
        on_first(create)
        on_first.agree()
        for written in modules:
            for key, view, array in _arrays_of(written, leaves, form):
                on_first(partial(_write_array, files, key, view, array))
        on_first(write_heads)
        for path, of in pieces.items():
            keys = [(piece, key) for piece in of for key in saved[piece.tensor]]
            for index, block in values.blocks(path) if of else ():
                on_first(partial(write_block, keys, index, block))
        on_first(finish)
        on_first.agree()
    except OSError as error:
        raise CheckpointError(f"{target}: export failed: {error.strerror or error}") from error
    return tensors


def _tied_heads(
    table: MappingTable, modules: Sequence[WrittenModule], form: AdapterForm
) -> list[tuple[WrittenModule, WrittenModule]]:
    """(head, embedding) of adapted embeddings that are heads too."""
    tied = []
    for head, embedding in table.tied.items():
        for written in modules:
            if f"{written.module.name}.weight" != embedding:
                continue
            if form.section["use_dora"]:
                raise PretrainedError(
                    f"{written.module.parts[0].path} is the head too, and PEFT has no DoRA of both "
                    "in one: leave it out of lora.target_modules, or set lora.use_dora false"
                )
            tied.append((replace(written, module=head_of(written.module, head), parts=[]), written))
    return tied


def _check_dims(
    table: MappingTable, weights: Mapping[str, Shape], dims: Mapping[str, WeightDims]
) -> None:
    """Raise PretrainedError if a weight's inputs here are not its module's inputs there."""
    problems = [
        f"{path} {list(weights[path])}: the inputs of its adapter are the dims "
        f"{list(dims[path].inputs)}, those of {rule.tensor} are {list(usual.inputs)}"
        for rule in table.rules
        if not is_parameter(rule)
        for _, paths in matches(rule, weights)
        for path in paths
        if path in dims and (usual := dims_of(rule, weights[path]))
        if {*usual.inputs} != {*dims[path].inputs}
    ]
    if problems:
        raise PretrainedError(f"these adapters have no form in PEFT's files:{lines(problems)}")


def _refuse_dora_of_parameters(modules: Sequence[WrittenModule]) -> None:
    paths = dict.fromkeys(e.module.parts[0].path for e in modules if e.module.kind == "parameter")
    if paths:
        raise PretrainedError(
            f"{listed([*paths])}: a parameter in Hugging Face's format, of which PEFT has no DoRA: "
            "name it in lora.exclude_modules, or set lora.use_dora false"
        )


def _adapted(written: WrittenModule) -> ModulePart:
    """The first part that is adapted."""
    pairs = zip(written.module.parts, written.parts, strict=True)
    return next(part for part, (rank, _) in pairs if rank)


def _in_blocks(written: WrittenModule) -> bool:
    """Whether its ranks are its parts', one after another."""
    return any(rank != written.rank for rank, _ in written.parts)


def _written(module: AdaptedModule, leaves: _Leaves, form: AdapterForm) -> WrittenModule:
    """The rank and alpha of a module, from those of its parts."""
    rslora = form.section["use_rslora"]

    def divisor(rank: int) -> float:
        return math.sqrt(rank) if rslora else rank

    known = [form.section["lora_alpha"], *(form.section["alpha_pattern"] or {}).values()]
    parts: list[tuple[int, float]] = []
    for part in module.parts:
        if (adapter := form.record.adapters.get(part.path)) is None:
            parts.append((0, 0.0))
            continue
        at = (adapter.per_layer(numbers)[part.stack] for numbers in (adapter.ranks, adapter.scales))
        rank, scale = (np.unique(of_part)[-1].item() for of_part in at)
        alphas = (alpha for alpha in known if rank and alpha / divisor(rank) == scale)
        parts.append((rank, next(alphas, scale * divisor(rank)) if rank else 0.0))
    adapted = [(rank, alpha) for rank, alpha in parts if rank]
    if len(adapted) < 2:
        return WrittenModule(module, parts, *(adapted[0] if adapted else (0, 0.0)))
    rank, alpha = adapted[0]
    if all(part_sizes == parts[0] for part_sizes in parts):
        first, *others = (
            leaves.of(module, part, A)[ranks_of(A, part, rank)] for part in module.parts
        )
        if all(np.array_equal(first, other) for other in others):
            return WrittenModule(module, parts, rank, alpha)
    total = sum(rank for rank, _ in parts)
    scaled = alpha * math.sqrt(total / rank) if rslora else alpha * total / rank
    return WrittenModule(module, parts, total, scaled)


def _arrays_of(
    written: WrittenModule, leaves: _Leaves, form: AdapterForm
) -> Iterator[tuple[str, Callable[[np.ndarray], np.ndarray], np.ndarray]]:
    """The arrays of a module: (key, view of its tensor that is the array's, array)."""
    module = written.module
    spans = rank_spans([rank for rank, _ in written.parts], written.rank)
    scales = relative_scales(written.parts, form.section["use_rslora"])
    for part, span, scale in zip(module.parts, spans, scales, strict=True):
        rank = span.stop - span.start
        for which in form.factors:
            if rank:
                array = leaves.of(module, part, which)[ranks_of(which, part, rank)]
            elif which == MAGNITUDE:
                array = leaves.norms(
                    module, part, form.record.adapters[_adapted(written).path].dims
                )
            else:
                continue
            array = array * np.float32(scale) if which == B and scale != 1 else array
            yield module.keys[which], partial(module.view, which, part, ranks=span), array


def _write_array(
    files: Sequence[TensorFile],
    key: str,
    view_of: Callable[[np.ndarray], np.ndarray],
    array: np.ndarray,
) -> None:
    view = view_of(files[0].array(key))
    view[...] = array.reshape(view.shape)


def _saved(
    form: AdapterForm, modules: Sequence[WrittenModule], bound: Bound, config: Mapping[str, Any]
) -> dict[str, list[str]]:
    """The keys of each of the model's own tensors that PEFT saves beside the factors."""
    adapted = {written.module.name for written in modules}
    kept = saved_modules(form, bound) if form.table else set()  # each complete
    targets = config["target_modules"] or ()
    trained = {piece.tensor for path in form.record.trained for piece in bound.pieces[path]}
    if form.table and form.section["bias"] == "lora_only":  # of a stack, those of adapted layers
        beside = {f"{name}.bias" for name in adapted}
        trained = {t for t in trained if not t.endswith(".bias") or t in beside}
    # With one of these names in the list, the weights of both embeddings that are adapted.
    inputs = (rule.tensor for rule in bound.table.rules if rule.kind == "embedding")
    both = {next(inputs, "").rpartition(".")[0], *(n for n in adapted if ends(n, SAVED_EMBEDDINGS))}
    embeddings = both & adapted if {*targets} & {*SAVED_EMBEDDINGS} else set()
    keys: dict[str, list[str]] = {}
    tied = bound.table.tied
    for tensor_name in (*bound.tensors, *tied):
        tensor = tied.get(tensor_name, tensor_name)
        module, _, name = tensor_name.rpartition(".")
        if tensor in trained or module in kept or module in embeddings:
            inside = ".base_layer" if module in adapted else ""
            key = f"{PREFIX}{module}{inside}.{name}" if module else PREFIX + name
            keys.setdefault(tensor, []).append(key)
    return keys
