"""A train state read from a checkpoint of DeepSpeed or torch, as if it were one of jaxspeed's."""

import contextlib
import math
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.checkpoint import Restored
from jaxspeed.checkpoint.header import Header, LeafRecord
from jaxspeed.checkpoint.leaves import SavedLeaf, key_data, saved_leaves
from jaxspeed.checkpoint.restore import restore_state
from jaxspeed.checkpoint.warm_start import restore_weights
from jaxspeed.errors import CheckpointError, ConfigError, PretrainedError
from jaxspeed.interop.exporting import NoHFForm, hf_form
from jaxspeed.interop.mapping import MappingTable, bind
from jaxspeed.interop.pretrained import FolderWeights
from jaxspeed.interop.safetensors import Tensor
from jaxspeed.interop.torch_moments import MOMENTS, count_of, in_units, moments_in
from jaxspeed.interop.torch_runs.dcp import METADATA, read_dcp
from jaxspeed.interop.torch_runs.deepspeed import read_deepspeed
from jaxspeed.interop.torch_runs.pickles import as_pretrained_error
from jaxspeed.interop.torch_runs.torch_run import AnyTensor, TensorInParts, TorchRun
from jaxspeed.optim.loss_scale import DynamicRule
from jaxspeed.placement.codec import Stored, StoredValue
from jaxspeed.placement.paths import counted, listed
from jaxspeed.placement.rows import Leaf
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.train_state.state_storage import read_shards
from jaxspeed.user_models.config_model import family_sizes
from jaxspeed.user_models.user_code import foreign

Table = MappingTable | Callable[[Any], MappingTable]
Shapes = Mapping[str, tuple[int, ...]]


def read_torch_run(folder: str | Path) -> TorchRun:
    """The run that a folder has a checkpoint of; a PretrainedError if none can be read."""
    path = Path(folder).expanduser()
    if (path / METADATA).is_file() or any(path.glob("*.distcp")):
        return read_dcp(path)
    if (path / "latest").is_file() or any(path.glob("*model_states.pt")):
        return read_deepspeed(path)
    if not path.is_dir():
        raise PretrainedError(f"{folder}: is no folder")
    if tags := sorted(p.parent.name for p in path.glob("*/*mp_rank_00_model_states.pt")):
        raise PretrainedError(f"{folder}: has no file latest; name one of its folders: {tags[-1]}")
    raise PretrainedError(
        f"{folder}: is no folder of a checkpoint of DeepSpeed or of torch's DCP. Megatron's own is "
        "read once it is exported to Hugging Face's"
    )


def table_in(path: str | Path) -> Table:
    """The `table` that a user's file defines: a MappingTable, or a function of the sizes."""
    table = runpy.run_path(str(path)).get("table") if Path(path).is_file() else None
    if not isinstance(table, MappingTable) and not callable(table):
        raise ConfigError(f"run.import_from.map: {path}: is no file that defines `table`")
    return table


def import_run(program: Program, run: TorchRun, table: Table | None, held: TrainState) -> Restored:
    """The state of a program at a run's checkpoint, with notes on what was not taken over.

    Args:
      table: which tensors are which parameters; None: by the model's family.
      held: the current state, which is freed once all has been checked. Its random streams stay.
    """
    if isinstance(program.model, AdaptedModel):
        raise CheckpointError(f"{run.folder}: import it without the section lora, and export it")
    if table is None:
        try:
            table = hf_form(program.config, program.source.model).table
        except NoHFForm:
            raise PretrainedError(
                f"{run.folder}: a model of no family needs a mapping table: run.import_from.map"
            ) from None
    elif not isinstance(table, MappingTable):
        with foreign("the table of run.import_from.map"):
            table = table(family_sizes(program.config))
    arrays = _Arrays(program, run, table, held)
    header = arrays.header()

    def ready() -> None:
        for leaf in jax.tree.leaves(held):
            leaf.delete()

    where = program, epath.Path(run.folder), header
    if run.no_optimizer:
        state, notes, _ = restore_weights(*where, {}, ready, arrays)
    else:
        state, _, notes = restore_state(*where, ready, {}, arrays)
    return Restored(state, run.folder.name, header.step, {}, {}, [*arrays.notes, *notes])


class _Arrays:
    """The arrays of a state by their names in a checkpoint, read from a run of torch's."""

    def __init__(
        self, program: Program, run: TorchRun, table: MappingTable, held: TrainState
    ) -> None:
        self._program, self._run, self._table, self._held = program, run, table, held
        self._leaves = saved_leaves(program)
        self._tensors: dict[str, tuple[FolderWeights, Leaf]] = {}
        self.notes = ["the position in the data and random states were not taken over"]

    def header(self) -> Header:
        """The header of a checkpoint that has what the run has."""
        run, rule = self._run, self._program.optimizer.rule
        parameters, variables = self._program.table.parameters, self._held.variables
        shapes = {path: self._program.table.shape_of(path) for path in parameters}
        read = {p: variables[p].shape for p in self._table.variables if p in variables}
        weights = self._weights(shapes | read, run.parameters, 0)
        for name, leaf in self._leaves.items():
            kind, _, path = name.partition("/")
            if kind in ("params", "ema") or (kind == "variables" and path in read):
                self._tensors[name] = weights, Leaf(path, leaf.shape, None)
        fields = {} if run.no_optimizer else self._add_moments(shapes)
        counts = {count_of(x, k, self._leaves) for k, of in fields.items() for x in of.values()}
        numbers: dict[str, Any] = {"step": run.steps, "skipped": run.skipped}
        for name, leaf in self._leaves.items():
            kind, _, path = name.partition("/")
            if kind == "opt" and not leaf.shape and name not in self._tensors:
                is_of_moments = name in counts or run.position is None
                numbers[name] = run.updates if is_of_moments else run.position
            elif kind == "variables" and path not in read:
                numbers[name] = key_data(variables[path]).addressable_data(0)
            elif kind == "loss_scale" and not isinstance(rule, DynamicRule):
                numbers[name] = getattr(self._held.loss_scale, path)
            elif kind == "loss_scale" and run.scaler:
                numbers[name] = run.scaler[path]
        dtypes = {name: self._leaves[name].stored.dtype for name in numbers}
        with as_pretrained_error(run.folder):
            self._numbers = {name: np.asarray(x, dtypes[name]) for name, x in numbers.items()}
        if run.no_optimizer:
            self.notes.append(f"it does not have {run.no_optimizer}")
        elif run.position is None:
            self.notes.append("the learning rate is that of its updates: it has no schedule")
        if inert := run.files.inert:
            names = [f"{name} ({number})" for name, number in sorted(inert.items())]
            self.notes.append(f"objects of these classes were not read: {listed(names)}")
        records = {
            name: LeafRecord(leaf.shape, leaf.stored.shape, self._dtype(name), leaf.key)
            for name, leaf in self._leaves.items()
            if name in self._tensors or name in self._numbers
        }
        has_scale = run.scaler or not isinstance(rule, DynamicRule)
        scale_rule, step = repr(rule) if has_scale else "static", run.steps
        tag, stage = run.folder.name, self._program.table.stage
        return Header(tag, step, 0.0, records, {}, "", 1, stage, scale_rule, {}, {}, [])

    def _dtype(self, name: str) -> str:
        """The dtype in which the run has a leaf."""
        weights, leaf = self._tensors.get(name, (None, None))
        if weights is None or leaf is None:
            return self._leaves[name].stored.dtype.name
        return weights.dtype_of(leaf.parameter)

    def _add_moments(self, shapes: Shapes) -> dict[str, dict[str, str]]:
        """Bind the moments of the optimizer's leaves, by their field in it."""
        run, fields = self._run, moments_in(self._leaves, shapes)
        there, needed = {*run.moments}, {MOMENTS[kind][0] for kind in fields if kind}
        if "" in fields or there != needed:
            needs = listed(sorted(needed | {*fields.get("", {}).values()})) or "none of it"
            raise CheckpointError(
                f"{run.folder}: its optimizer has {listed(sorted(there)) or 'no state'}, and that "
                f"of the config needs {needs}"
            )
        for kind, names in fields.items():
            key, power = MOMENTS[kind]
            trained = {path: shapes[path] for path in names}
            weights = self._weights(trained, run.moments[key], power)
            for path, name in names.items():
                self._tensors[name] = weights, Leaf(path, shapes[path], None)
        return fields

    def _weights(
        self, shapes: Shapes, tensors: Mapping[str, AnyTensor], power: int
    ) -> FolderWeights:
        """Tensors as a model's values; moments in units of the parameters' gradients."""
        try:
            table, prefix = _fitting(self._table, shapes, tensors)
        except PretrainedError as error:
            raise PretrainedError(f"{self._run.folder}: {error}") from None
        inside = {
            name.removeprefix(prefix): x
            for name, x in tensors.items()
            if name.startswith(prefix) and jnp.issubdtype(x.dtype, jnp.inexact)
        }
        if unread := sorted(tensors.keys() - {f"{prefix}{name}" for name in inside}):
            self.notes.append(f"{counted(len(unread), 'tensor')} were not read: {listed(unread)}")
        files = self._run.files
        folder: Any = SimpleNamespace(
            path=self._run.folder,
            tensors={n: Tensor(n, x.shape, x.dtype) for n, x in inside.items()},
            array=lambda name: files.array(inside[name]),
            release=files.release,
            digests=dict,  # what is read becomes a checkpoint of its own
        )
        weights = FolderWeights(folder, in_units(table, power))
        weights.check(shapes)
        for tensor in inside.values():
            if isinstance(
                tensor, TensorInParts
            ):  # what is damaged is found before a state is freed
                tensor.check()
        return weights

    def __call__(self, _: epath.Path, wanted: Mapping[str, SavedLeaf]) -> dict[str, Stored]:
        """Values by name in the wanted shape, dtype and sharding."""
        some = {name: leaf.stored for name, leaf in wanted.items() if math.prod(leaf.stored.shape)}
        values = {name: self._read(name, stored) for name, stored in some.items()}
        self._run.files.assembled = {}
        return values

    def _read(self, name: str, stored: jax.ShapeDtypeStruct) -> jax.Array:
        shape, at = tuple(stored.shape), stored.sharding
        if name in self._numbers:
            return jax.make_array_from_callback(shape, at, self._numbers[name].__getitem__)
        weights, leaf = self._tensors[name]
        return read_shards(weights, leaf, StoredValue(leaf.shape, shape, stored.dtype, at))


def _fitting(
    table: MappingTable, shapes: Shapes, there: Mapping[str, Any]
) -> tuple[MappingTable, str]:
    """The table, of names in files or in memory, and the prefix under which most tensors are."""
    best = 0, table, [""]
    for candidate in (table, table.in_memory()):
        with contextlib.suppress(*[PretrainedError] * (candidate is not table)):
            names = bind(candidate, shapes, len(there)).tensors
            longest = max(names, key=len, default="")
            prefixes = {n.removesuffix(longest) for n in there if n.endswith(f".{longest}")}
            fits = {p: sum(f"{p}{name}" in there for name in names) for p in {"", *prefixes}}
            if (most := max(fits.values())) > best[0]:
                best = most, candidate, sorted(p for p in fits if fits[p] == most)
    _, chosen, fitting = best
    if len(fitting) > 1:
        raise PretrainedError(f"has the model's tensors under several prefixes: {listed(fitting)}")
    return chosen, fitting[0]
