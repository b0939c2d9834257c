"""The adapters of an engine: the one in use, and those that are loaded beside it."""

from pathlib import Path

import jax.numpy as jnp

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.adapters.choose_adapters import refuse_unlike
from jaxspeed.checkpoint import Restored
from jaxspeed.checkpoint.other_adapters import OtherAdapter, exchanged, other_adapter
from jaxspeed.engine.values import current_value, with_magnitudes
from jaxspeed.errors import ConfigError
from jaxspeed.interop import saved_adapter
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Row
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState


class LoadedAdapters:
    """The adapters of one program by name.

    Attributes:
      used: the name of the one in use; None: the base alone.
      others: those that are not in use.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.used: str | None = "default"
        self.others = dict[str, OtherAdapter]()

    def in_use(self, what: str) -> str:
        """The name of the adapter in use, without which `what` is refused."""
        if self.used is None:
            raise ConfigError(
                f"{what}: no adapter is in use since use_adapter(None); choose one first: "
                + ", ".join(sorted(self.others))
            )
        return self.used

    def restore(self, restored: Restored) -> None:
        """Take over the adapters of a checkpoint, whose state is the engine's now."""
        if restored.adapter is not None:
            self.used = restored.adapter
            self.others |= restored.adapters
            self.others.pop(self.used, None)

    def load(self, folder: str | Path, name: str) -> None:
        """Read an adapter from a folder, for `exchange`."""
        program = self._program
        if not isinstance(program.model, AdaptedModel):
            raise ConfigError("load_adapter: the config has no section lora")
        self._refuse_disk("load_adapter")
        if name == self.used:
            raise ConfigError(f"load_adapter: {name!r} is in use; give another name")
        if not name or "/" in name:
            raise ConfigError(f"load_adapter: {name!r} is no name: it is empty, or has a slash")
        saved = saved_adapter(folder, program.config, program.source.model)
        table = program.table
        shapes = {path: table.shape_of(path) for path in table.parameters}
        base_shapes = {
            path: shape for path, shape in shapes.items() if not path.startswith("lora/")
        }
        refuse_unlike(saved, program.model.adapters, base_shapes)
        values = saved.values(shapes)
        ours = {row.leaf.parameter for row in self._rows()}
        if unlike := sorted(values.keys() ^ ours):
            where = "it alone has" if unlike[0] in values else "it lacks"
            raise ConfigError(
                f"load_adapter: {where} {listed(unlike)}; lora.use_dora, lora.modules_to_save and "
                "lora.bias have to be those of the adapter: start another engine with lora.adapter"
            )
        self.others[name] = other_adapter(program, values)

    def exchange(self, state: TrainState, name: str | None) -> TrainState:
        """The state with another adapter, or with the base alone; the one in use is kept."""
        if name is not None and name not in self.others:
            raise ConfigError(
                f"use_adapter: {name!r} is not loaded; there are "
                + ", ".join(sorted(filter(None, {self.used, *self.others})))
            )
        self._refuse_disk("use_adapter")
        other = self._base_alone(state) if name is None else self.others.pop(name)
        state, taken = exchanged(self._program, state, other)
        if name is None:  # the magnitudes of DoRA are the norms of the weights
            state = with_magnitudes(self._program, state, set(self._factors()))
        if self.used is not None:
            self.others[self.used] = taken
        self.used = name
        return state

    def _refuse_disk(self, what: str) -> None:
        if self._program.update.tier:
            raise ConfigError(
                f"{what}: masters and moments of several adapters are not stored on a disk; set "
                'zero_optimization.offload_optimizer.device to "cpu" or "none"'
            )

    def _base_alone(self, state: TrainState) -> OtherAdapter:
        """An adapter whose factors are zero."""
        if not isinstance(self._program.model, AdaptedModel):
            raise ConfigError("use_adapter(None): the config has no section lora")
        rows = self._rows()  # a base may be too large to be decoded
        values = {row.path: current_value(state, row) for row in rows}
        current = self._program.table.joined(values)
        if trained := [path for path in current if not path.startswith("lora/")]:
            raise ConfigError(
                f"use_adapter(None): {listed(trained)} are trained beside the adapters "
                "(lora.modules_to_save, lora.bias), and the base's own values are not kept; "
                "evaluate an engine without the section lora"
            )
        zeros = {path: jnp.zeros_like(current[path]) for path in self._factors()}
        return other_adapter(self._program, {**current, **zeros})

    def _factors(self) -> list[str]:
        """The paths of the factors of an adapted model."""
        model = self._program.model
        assert isinstance(model, AdaptedModel)
        return [adapter.leaf(name) for adapter in model.adapters.values() for name in ("A", "B")]

    def _rows(self) -> list[Row]:
        """What an adapter has: its leaves, and the parameters that are trained beside them."""
        of_each = self._program.table.parameters.values()
        trained_rows = (
            rows for rows in of_each if any(r.leaf.adapts or r.leaf.trainable for r in rows)
        )
        return [row for rows in trained_rows for row in rows]
