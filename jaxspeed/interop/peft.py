"""Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

Here they are read. `peft_layout` has the names and layouts of the tensors, `peft_config` the other
file, and `peft_export` writes both as PEFT does.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.mapping import MappingTable, TensorRule, TensorShare, bind, lines, matches
from jaxspeed.interop.peft_config import CONFIG, MOST, matching_value, read_config
from jaxspeed.interop.peft_layout import (
    FOLDER,
    LEAVES,
    PARTS,
    PREFIX,
    TENSORS,
    A,
    AdaptedModule,
    B,
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
from jaxspeed.interop.safetensors import Tensor, TensorFile
from jaxspeed.jaxpr.weight_uses import WeightDims


@dataclass(frozen=True)
class PeftAdapter:
    """A saved adapter, of whose tensors nothing has been read."""

    folder: Path
    config: Mapping[str, Any]  # in PEFT's words, with all of their defaults
    file: TensorFile
    parts: Mapping[str, Sequence[tuple[int, float]]]  # of modules in blocks: ranks and alphas


@dataclass(frozen=True)
class AdaptedWeight:
    """The rank and alpha of a weight, for each number in its stacked dims; of rank 0 is none."""

    ranks: np.ndarray
    alphas: np.ndarray


def read_adapter(folder: str | Path) -> PeftAdapter:
    """A folder that PEFT or jaxspeed saved.

    Raises:
      PretrainedError: it is none, or an adapter of another kind than LoRA.
    """
    path = Path(folder).expanduser()
    config = read_config(path)
    if not (path / TENSORS).is_file():
        problem = f"{folder}: has no {TENSORS}"
        if pickled := sorted(file.name for file in path.glob("*.bin")):
            problem += (
                f"; {pickled[0]} is a pickle, which could run any code: convert it where you trust "
                "it, with PEFT: PeftModel.from_pretrained(...).save_pretrained(...)"
            )
        raise PretrainedError(problem)
    file = TensorFile.open(path / TENSORS)
    try:
        stored = json.loads(file.metadata.get(PARTS, "{}"))
        parts = {
            str(name): [(int(rank), float(alpha)) for rank, alpha in of]
            for name, of in stored.items()
        }
    except (ValueError, TypeError, AttributeError):
        raise PretrainedError(f"{file.path}: its metadata {PARTS} is damaged") from None
    return PeftAdapter(path, config, file, parts)


class _Reader:
    """The modules of an adapter, found by the names of its tensors."""

    def __init__(
        self, adapter: PeftAdapter, weights: Mapping[str, Shape], table: MappingTable | None
    ) -> None:
        self.adapter, self.weights = adapter, weights
        self.there = adapter.file.tensors
        self._by_path = table is None
        tables = (
            [path_table(weights, _stacks(self.there, weights))]
            if table is None
            # In files as in transformers 4.
            else [table.in_memory(), *([table] if table.modules or table.memory else [])]
        )
        self.modules = self._with(max(tables, key=lambda table: len(self._with(table))))
        self.bound = bind(self.table, weights)

    def base_name(self, key: str) -> str:
        """The name of a tensor of the model itself, by its key in an adapter."""
        name = self._removed + key.removeprefix(PREFIX)
        module, _, last = name.rpartition(".")
        return f"{module.removesuffix('.base_layer')}.{last}" if module else name

    @property
    def replaced(self) -> dict[str, list[tuple[TensorShare, str]]]:
        """The parameters that are in the adapter itself, with the tensors of each.

        PEFT saves the weight of an adapted embedding as well, which is the base's.
        """
        keys = {self.base_name(k): k for k in self.there if not k.endswith(".base_layer.weight")}
        in_adapter = {}
        for path, pieces in self.bound.pieces.items():
            if there := [(piece, keys[piece.tensor]) for piece in pieces if piece.tensor in keys]:
                in_adapter[path] = there
        return in_adapter

    def key(self, key: str) -> str:
        """A key as the adapter has it: those of a bare model's lack the prefix."""
        return PREFIX + key.removeprefix(PREFIX).removeprefix(self._removed)

    def tensor(self, module: AdaptedModule, which: int) -> Tensor | None:
        return self.there.get(self.key(module.keys[which]))

    def rank(self, module: AdaptedModule) -> int:
        """The rank of a module: A has the ranks of all of its parts."""
        a = self.tensor(module, A)
        return a.shape[0] // module.experts if a is not None and a.shape else 0

    def parts(self, module: AdaptedModule) -> list[tuple[int, float]]:
        """(rank, alpha) of each part."""
        if saved_parts := self.adapter.parts.get(module.name):
            return list(saved_parts)
        config = self.adapter.config
        alpha = matching_value(config["alpha_pattern"], module.name, config["lora_alpha"])
        return [(self.rank(module), alpha) for _ in module.parts]

    def _with(self, table: MappingTable) -> list[AdaptedModule]:
        """The modules by the names of a table, which is the reader's from now on."""
        self.table = table
        bare = table.prefix and not any(n.startswith(PREFIX + table.prefix) for n in self.there)
        self._removed = table.prefix if bare else ""
        return self._found()

    def _found(self) -> list[AdaptedModule]:
        parameters = self.adapter.config["target_parameters"] or ()
        dims: dict[str, WeightDims] = {}
        for rule in self.table.rules:
            ends = (f".{rule.tensor}".endswith(f".{name}") for name in parameters)
            if is_parameter(rule) and not any(ends):
                continue
            for _, paths in matches(rule, self.weights):
                for path in paths:
                    shape = self.weights[path]
                    fits = partial(self._fits, rule, shape) if self._by_path else None
                    if weight_dims := dims_of(rule, shape, fits):
                        dims[path] = weight_dims
        modules = modules_of(self.table, self.weights, dims)
        for module in modules:  # which dim of a parameter has the inputs is seen in A
            a = self.tensor(module, A)
            if module.kind == "parameter" and a and a.shape[1:] != module.shapes[A][1:]:
                for path in (part.path for part in module.parts):
                    usual = dims[path]
                    dims[path] = replace(usual, inputs=usual.outputs, outputs=usual.inputs)
        modules = modules_of(self.table, self.weights, dims)
        self.heads = {
            module.name: head_of(module, head)
            for module in modules
            for head, embedding in self.table.tied.items()
            if embedding == f"{module.name}.weight"
        }
        return [m for m in modules if self.tensor(m, A) or self.tensor(m, B)]

    def untied(self) -> list[str]:
        """What the adapter has of tied weights that are not equal."""
        problems = []

        alphas = self.adapter.config["alpha_pattern"]
        for name, head in self.heads.items():
            alpha, of_head = (matching_value(alphas, n, None) for n in (name, head.name))
            if alpha != of_head:
                problems.append(f"{name} and {head.name} have other alphas: {alpha} and {of_head}")
            embedding = f"{PREFIX}{name}.lora_embedding_"
            pairs = [(head.keys[A], f"{embedding}B"), (head.keys[B], f"{embedding}A")]
            pairs += [(f"{PREFIX}{head.name}.weight", f"{PREFIX}{name}.weight")]
            for key, twin in ((self.key(x), self.key(y)) for x, y in pairs):
                if (key in self.there) != (twin in self.there):
                    lone = key if key in self.there else twin
                    problems.append(
                        f"{lone} changes the embedding or its head alone, which are one weight here"
                    )
                elif key in self.there:
                    a, b = self.adapter.file.array(key), self.adapter.file.array(twin)
                    b = b if key.endswith(f"{head.name}.weight") else b.T
                    if not np.array_equal(a, b):
                        problems.append(f"{key} and {twin} differ, which are one weight here")
        return problems

    def _fits(self, rule: TensorRule, shape: Shape, dims: WeightDims) -> bool:
        """Whether these inputs are those of A, of a weight that has no table."""
        name = re.sub(r"\{\w+\}", "0", rule.tensor).removesuffix(".weight")
        a = self.there.get(f"{PREFIX}{name}.lora_A.weight")
        return a is None or a.shape[1:] == tuple(shape[dim] for dim in dims.inputs)


@dataclass(frozen=True)
class AdapterFolder:
    """A saved adapter of a model with this mapping table, for `lora.adapter`."""

    adapter: PeftAdapter
    table: MappingTable | None

    def settings(self, shapes: Mapping[str, Shape]) -> dict[str, Any]:
        return lora_section(self.adapter, shapes, self.table)

    def ranks(self, shapes: Mapping[str, Shape]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        adapted = adapted_weights(self.adapter, shapes, self.table)
        return {path: (weight.ranks, weight.alphas) for path, weight in adapted.items()}

    def values(self, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        return adapter_values(self.adapter, shapes, self.table)


def _stacks(there: Mapping[str, Tensor], weights: Mapping[str, Shape]) -> dict[str, int]:
    """The adapted weights of a model without a table: how many numbers follow their paths."""
    counts = {}
    ends = re.compile(r"((?:\.\d+)*)\.lora_A\.weight")
    for path in weights:
        begin = PREFIX + path.replace("/", ".")
        for name in there:
            if name.startswith(begin) and (end := ends.fullmatch(name, len(begin))):
                counts[path] = end[1].count(".")
                break
    return counts


def adapted_weights(
    adapter: PeftAdapter, weights: Mapping[str, Shape], table: MappingTable | None
) -> dict[str, AdaptedWeight]:
    """The weights that an adapter adapts, by path.

    Args:
      weights: the shapes of the model's parameters.
      table: the model's mapping table; None: the adapter was saved from a model without one.

    Raises:
      PretrainedError: it is an adapter of another model; lists the first differences.
    """
    reader = _Reader(adapter, weights, table)
    _check(reader)
    adapted: dict[str, AdaptedWeight] = {}
    for module in reader.modules:
        for part, (rank, alpha) in zip(module.parts, reader.parts(module), strict=True):
            if rank:
                stack = weights[part.path][: len(part.stack)]
                blank = AdaptedWeight(np.zeros(stack, np.int32), np.ones(stack))
                weight = adapted.setdefault(part.path, blank)
                weight.ranks[part.stack], weight.alphas[part.stack] = rank, alpha
    return adapted


def adapter_values(
    adapter: PeftAdapter, leaves: Mapping[str, Shape], table: MappingTable | None
) -> dict[str, np.ndarray]:
    """The values of an adapter by path: of its factors, and of parameters that it replaces.

    Args:
      leaves: the shapes of the model's parameters, `lora/P/A` and the others among them. Ranks
        that differ within a stack are padded with zeros. Layers of a bias that it does not have
        are masked.

    Raises:
      PretrainedError: it is an adapter of another model; lists the first differences.
    """
    weights = {path: shape for path, shape in leaves.items() if not path.startswith(FOLDER)}
    reader = _Reader(adapter, weights, table)
    _check(reader)
    values: dict[str, np.ndarray] = {}

    factors = range(3 if adapter.config["use_dora"] else 2)
    for module in reader.modules:
        parts = reader.parts(module)
        spans = rank_spans([rank for rank, _ in parts], reader.rank(module))
        scales = relative_scales(parts, adapter.config["use_rslora"])
        for part, span, scale in zip(module.parts, spans, scales, strict=True):
            rank = span.stop - span.start
            for which in factors if rank else ():
                path = f"{FOLDER}{part.path}/{LEAVES[which]}"
                if path not in leaves:
                    raise PretrainedError(
                        f"{adapter.folder}: adapts {part.path}, but the model has no {path}"
                    )
                if path not in values:
                    values[path] = np.zeros(leaves[path], np.float32)
                tensor = reader.tensor(module, which)
                assert tensor is not None, "checked"
                view = module.view(which, part, adapter.file.array(tensor.name), span)
                into = values[path][part.stack][ranks_of(which, part, rank)]
                if into.size != view.size:
                    raise PretrainedError(
                        f"{adapter.folder}: {tensor.name} has rank {rank}, of which {path} "
                        f"{list(leaves[path])} has no room"
                    )
                into[...] = view.reshape(into.shape)
                if which == B and scale != 1:
                    into /= np.float32(scale)
    for path, pieces in reader.replaced.items():
        values[path] = np.empty(weights[path], np.float32)
        index = tuple(slice(0, n) for n in weights[path])
        absent = np.ones(weights[path], bool)
        for piece, name in pieces:
            piece.read(adapter.file.array(name), index, values[path])
            absent[tuple(slice(None) if n is None else n for n in piece.at)] = False
        if absent.any():
            values[path] = np.ma.masked_array(values[path], absent)
    adapter.file.release()
    return values


def _check(reader: _Reader) -> None:
    """Raise PretrainedError unless all tensors are those of the model."""
    config = reader.adapter.config
    problems: list[str] = []
    known = {reader.key(key) for head in reader.heads.values() for key in head.keys[:2]}
    for module in reader.modules:
        rank, parts = reader.rank(module), reader.parts(module)
        asked = matching_value(config["rank_pattern"], module.name, config["r"])
        if rank and rank != asked:
            problems.append(f"{module.name} has rank {rank}, but {CONFIG} says {asked}")
        if len(parts) != len(module.parts) or sum(r for r, _ in parts) not in (
            rank,
            rank * len(parts),
        ):
            problems.append(f"{module.name}: its parts {parts} are not those of rank {rank}")
        for which in range(3 if config["use_dora"] else 2):
            key = reader.key(module.keys[which])
            shape = module.shape(which, rank or asked)
            known.add(key)
            if key not in reader.there:
                problems.append(f"{key} {list(shape)} is missing")
            elif reader.there[key].shape != shape:
                there = list(reader.there[key].shape)
                problems.append(f"{key} has shape {there}, expected {list(shape)}")
    for key, tensor in reader.there.items():
        if key in known:
            continue
        name = reader.base_name(key)
        expected = reader.bound.tensors.get(reader.table.tied.get(name, name))
        if expected is None:
            near = difflib.get_close_matches(key, known, n=1)
            problems.append(f"{key} {list(tensor.shape)} is of no module of the model")
            problems[-1] += f" (nearest: {near[0]})" if near else ""
        elif expected != tensor.shape:
            problems.append(f"{key} has shape {list(tensor.shape)}, expected {list(expected)}")
    problems += reader.untied()
    adapted = {f"{module.name}.bias" for module in reader.modules}
    for path, pieces in reader.replaced.items():
        all_of = {piece.tensor for piece in reader.bound.pieces[path]}
        absent = all_of - {piece.tensor for piece, _ in pieces}
        if config["bias"] == "lora_only" and path.endswith("/bias"):
            absent &= adapted  # PEFT has those of the adapted layers
        if absent:
            count = len(pieces)
            problems.append(f"{path}: {count} of its {len(all_of)} tensors are there")
    if not problems and not reader.modules:
        problems = ["it adapts nothing"]
    if problems:
        base = config["base_model_name_or_path"]
        what = f"an adapter of {base!r}" if base else "an adapter"
        raise PretrainedError(
            f"{reader.adapter.file.path}: {what}, but not of this model:{lines(problems, MOST)}"
        )


def lora_section(
    adapter: PeftAdapter, weights: Mapping[str, Shape], table: MappingTable | None
) -> dict[str, Any]:
    """The keys of the section `lora` that an adapter has, but for what is adapted.

    That is `adapted_weights`, of which arguments and errors are the same. `modules_to_save` has the
    paths of the parameters that are in the adapter itself.
    """
    reader = _Reader(adapter, weights, table)
    _check(reader)
    config = adapter.config
    keys = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "bias")
    section = {key: config[key] for key in keys}
    if config["init_lora_weights"] in (True, False, "gaussian"):
        section["init_lora_weights"] = config["init_lora_weights"]
    biases = {path for path in reader.replaced if path.rpartition("/")[2] == "bias"}
    if saved := [p for p in reader.replaced if config["bias"] == "none" or p not in biases]:
        section["modules_to_save"] = saved
    return section
