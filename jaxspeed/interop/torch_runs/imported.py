"""A train state read from a checkpoint of DeepSpeed or torch, as if it were one of jaxspeed's.

Its tensors are read by a mapping table, a shard at a time, under the names that a checkpoint has:
parameters from the masters, `opt/.../mu/PATH` from torch's `exp_avg`, and so on.
"""

import contextlib
import math
import runpy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from jaxspeed.interop.moments import MOMENTS, in_units, moments_in
from jaxspeed.interop.pretrained import FolderWeights
from jaxspeed.interop.torch_runs.dcp import is_dcp, read_dcp
from jaxspeed.interop.torch_runs.deepspeed import is_deepspeed, read_deepspeed
from jaxspeed.interop.torch_runs.torch_run import AnyTensor, TorchRun, TorchTensors
from jaxspeed.optim.loss_scale import DynamicRule
from jaxspeed.placement.codec import Stored, StoredValue
from jaxspeed.placement.paths import counted, listed
from jaxspeed.placement.rows import IS_RANGE, LayerRange, Leaf
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.train_state.state_storage import read_shards
from jaxspeed.user_models.config_model import family_sizes
from jaxspeed.user_models.user_code import foreign

_READ = (
    "DeepSpeed's (stages 0 to 3, its pipeline, universal) and those of torch's DCP. Megatron's own "
    "are read as Hugging Face folders, if it exports them"
)


def read_torch_run(folder: str | Path) -> TorchRun:
    """The run that a folder has a checkpoint of.

    Raises:
      PretrainedError: it has none that is read, or a damaged one.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise PretrainedError(f"{folder}: no such folder")
    if is_dcp(path):
        return read_dcp(path)
    if is_deepspeed(path):
        return read_deepspeed(path)
    raise PretrainedError(f"{folder}: has no checkpoint that can be imported: these are {_READ}")


def table_in(path: str | Path) -> MappingTable | Callable[[Any], MappingTable]:
    """The `table` that a file of the user's defines: a MappingTable, or a function of the sizes.

    Raises:
      ConfigError: it defines none.
    """
    if not Path(path).is_file():
        raise ConfigError(f"run.import_from.map: {path}: no such file")
    table = runpy.run_path(str(path)).get("table")
    if not isinstance(table, MappingTable) and not callable(table):
        raise ConfigError(f"run.import_from.map: {path}: defines no MappingTable named table")
    return table


def import_run(
    program: Program,
    run: TorchRun,
    table: MappingTable | Callable[[Any], MappingTable] | None,
    held: TrainState,
) -> Restored:
    """The state of a program at a run's checkpoint, with notes on what was not taken over.

    Args:
      table: which tensors are which parameters, or a function of the model's sizes (of a family) or
        of its config's keys that returns it; None is that of the model's family.
      held: the current state, whose memory is freed once all has been checked. Its variables that
        the run does not have, such as random streams, stay.

    Raises:
      CheckpointError, PretrainedError: the run is of another model or optimizer.
    """
    if isinstance(program.model, AdaptedModel):
        raise CheckpointError(
            f"{run.folder}: a run with a section lora begins from a model's folder: import the run "
            "without the section, and export it (jaxspeed checkpoint export --format hf)"
        )
    if table is None:
        try:
            table = hf_form(program.config, program.source.model).table
        except NoHFForm:
            raise PretrainedError(
                f"{run.folder}: the model is of no family, so that its tensors need a mapping "
                "table: run.import_from.map, or --map"
            ) from None
    elif not isinstance(table, MappingTable):
        section = program.config.model
        with foreign("the table of run.import_from.map"):
            table = table(family_sizes(program.config) or (section.config if section else {}))
    source = _ImportedArrays(program, run, table, held)

    def ready() -> None:
        for leaf in jax.tree.leaves(held):
            leaf.delete()

    path, header = epath.Path(run.folder), source.header()
    if run.no_optimizer:
        state, notes, _ = restore_weights(program, path, header, {}, ready, source)
        notes = [f"it does not have {run.no_optimizer}", *notes]
    else:
        state, _, notes = restore_state(program, path, header, ready, {}, source)
    return Restored(state, run.folder.name, header.step, {}, {}, [*source.notes, *notes])


@dataclass
class _ImportedArrays:
    """Reads the arrays of a state from a run of torch's."""

    program: Program
    run: TorchRun
    table: MappingTable
    held: TrainState
    notes: list[str] = field(default_factory=list)
    _sources: dict[str, tuple[FolderWeights, Leaf]] = field(default_factory=dict)
    _numbers: dict[str, Any] = field(default_factory=dict)
    _rule: str = "another"

    def header(self) -> Header:
        """The header of a checkpoint with what the run has.

        Raises:
          CheckpointError, PretrainedError: it is of another model or optimizer.
        """
        leaves = saved_leaves(self.program)
        self._find_weights(leaves)
        if not self.run.no_optimizer:
            self._find_moments(leaves)
        self._find_numbers(leaves)
        self._tell()
        records = {}
        for name, (weights, leaf) in self._sources.items():
            stored = leaves[name]
            dtype = weights.dtype_of(leaf.parameter)
            records[name] = LeafRecord(leaf.shape, stored.stored.shape, dtype)
        for name, value in self._numbers.items():
            stored = leaves[name]
            records[name] = LeafRecord(
                stored.shape, stored.stored.shape, value.dtype.name, stored.key
            )
        step = 0 if self.run.no_optimizer else self.run.steps
        program = self.program
        return Header(
            self.run.folder.name, step, 0.0, records, {}, "", 1, program.table.stage, self._rule,
            {}, {}, [],
        )  # fmt: skip

    def _find_weights(self, leaves: Mapping[str, SavedLeaf]) -> None:
        table = self.program.table
        variables = self.held.variables
        shapes = {path: table.shape_of(path) for path in table.parameters}
        shapes |= {p: variables[p].shape for p in self.table.variables if p in variables}
        weights = self._weights(shapes, self.run.parameters, 0)
        for name, leaf in leaves.items():
            kind, _, path = name.partition("/")
            if kind in ("params", "ema") or (kind == "variables" and path in shapes):
                self._sources[name] = weights, _leaf(path, leaf.shape)
        if any(name.startswith("ema/") for name in leaves):
            self.notes.append("the moving average begins at its parameters")

    def _find_moments(self, leaves: Mapping[str, SavedLeaf]) -> None:
        table = self.program.table
        parameters = {*table.parameters, *(row.path for row in table)}
        fields = moments_in((n for n, x in leaves.items() if x.shape), parameters)
        for kind, names in fields.items():
            if kind not in MOMENTS:
                some = listed(sorted(names.values()))
                raise CheckpointError(
                    f"{self.run.folder}: has no such state of an optimizer: {some}"
                )
            key, power = MOMENTS[kind]
            if key not in self.run.moments:
                raise CheckpointError(
                    f"{self.run.folder}: its optimizer has {listed(sorted(self.run.moments))}, and "
                    f"that of the config needs {key}"
                )
            of_kind = {name: _leaf(path, leaves[name].shape) for path, name in names.items()}
            shapes = {x.parameter: table.shape_of(x.parameter) for x in of_kind.values()}
            weights = self._weights(shapes, self.run.moments[key], power)
            self._sources |= {name: (weights, leaf) for name, leaf in of_kind.items()}
        if unused := self.run.moments.keys() - {MOMENTS[kind][0] for kind in fields}:
            raise CheckpointError(
                f"{self.run.folder}: its optimizer has {listed(sorted(unused))}, which that of the "
                "config does not have"
            )

    def _weights(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, AnyTensor],
        power: int,
    ) -> FolderWeights:
        """Tensors as a model's values; moments in units of the parameters' gradients."""
        table, prefix = _fitting(self.table, shapes, tensors)
        table = in_units(table, power) if power else replace(table, variables=())
        inside = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
        floats = {
            n: x for n, x in inside.items() if jnp.issubdtype(jnp.dtype(x.dtype), jnp.inexact)
        }
        if unread := sorted(tensors.keys() - {f"{prefix}{n}" for n in floats}):
            self.notes.append(f"{counted(len(unread), 'tensor')} were not read: {listed(unread)}")
        folder: Any = TorchTensors(self.run, floats)
        weights = FolderWeights(folder, table)
        weights.check(shapes)
        return weights

    def _find_numbers(self, leaves: Mapping[str, SavedLeaf]) -> None:
        run, numbers = self.run, dict[str, Any]()
        numbers["step"], numbers["skipped"] = run.steps, run.skipped
        counts = [name for name in leaves if name.startswith("opt/") and not leaves[name].shape]
        for name in counts:
            beside = name.rpartition("/")[0]
            has_moments = any(n.startswith(f"{beside}/{kind}/") for kind in MOMENTS for n in leaves)
            position = run.updates if has_moments or run.position is None else run.position
            numbers[name] = position
        if run.scaler is not None and isinstance(self.program.optimizer.rule, DynamicRule):
            scaler, self._rule = run.scaler, repr(self.program.optimizer.rule)
            numbers |= {f"loss_scale/{k}": x for k, x in scaler.items()}
        elif run.scaler is None and not isinstance(self.program.optimizer.rule, DynamicRule):
            scale, self._rule = self.held.loss_scale, repr(self.program.optimizer.rule)
            numbers |= {f"loss_scale/{k}": np.asarray(x) for k, x in scale._asdict().items()}
        for path, x in self.held.variables.items():
            if f"variables/{path}" not in self._sources:
                numbers[f"variables/{path}"] = np.asarray(key_data(x).addressable_data(0))
        self._numbers = {
            name: np.asarray(x, leaves[name].stored.dtype) for name, x in numbers.items()
        }

    def _tell(self) -> None:
        self.notes.append(
            "the position in the data and the state of random numbers were not taken over: steps "
            "go on in this run's own order"
        )
        if self.run.position is None and not self.run.no_optimizer:
            self.notes.append("it has no schedule: the learning rate is that of the updates so far")
        if self.run.files.inert:
            names = [f"{name} ({number})" for name, number in sorted(self.run.files.inert.items())]
            self.notes.append(f"objects of these classes were not read: {listed(names)}")

    def __call__(self, _: epath.Path, wanted: Mapping[str, SavedLeaf]) -> dict[str, Stored]:
        """Values by name in the wanted shape, dtype and sharding."""
        return {
            name: self._read(name, leaf)
            for name, leaf in wanted.items()
            if math.prod(leaf.stored.shape)
        }

    def _read(self, name: str, leaf: SavedLeaf) -> jax.Array:
        stored = leaf.stored
        if name in self._numbers:
            value = self._numbers[name]
            return jax.make_array_from_callback(stored.shape, stored.sharding, lambda at: value[at])
        weights, of = self._sources[name]
        form = StoredValue(of.shape, tuple(stored.shape), stored.dtype, stored.sharding)
        return read_shards(weights, of, form)


def _leaf(path: str, shape: Sequence[int]) -> Leaf:
    """A parameter, or a range of its layers, by its path."""
    parameter, _, last = path.rpartition("/")
    layers = None
    if IS_RANGE.fullmatch(last):
        start, stop = map(int, last[1:-1].split(":"))
        layers = LayerRange(parameter, start, stop, "")
    return Leaf(path, tuple(shape), None, range=layers)


def _fitting(
    table: MappingTable, shapes: Mapping[str, tuple[int, ...]], there: Collection[str]
) -> tuple[MappingTable, str]:
    """The table of names in files or in memory, and the prefix, under which most tensors are."""
    best = -1, table, ""
    for candidate in (table, table.in_memory()):
        with contextlib.suppress(*([] if candidate is table else [PretrainedError])):
            names = bind(candidate, shapes, len(there)).tensors
            longest = max(names, key=len, default="")
            prefixes = Counter(n.removesuffix(longest) for n in there if n.endswith(f".{longest}"))
            for prefix in ("", *prefixes):
                fits = sum(f"{prefix}{name}" in there for name in names)
                if fits > best[0]:
                    best = fits, candidate, prefix
    return best[1:]
