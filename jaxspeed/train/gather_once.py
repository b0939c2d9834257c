"""What many calls of a model read, computed once: gathered parameters, where they fit; squares.

Under ZeRO 3 each call of a model gathers its parameters, and transfers those in host memory. A call
for one token does little else, and an evaluation makes many with the same parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.hardware.targets import memory_of_machine
from jaxspeed.placement.codec import pad
from jaxspeed.placement.table import PlacementTable
from jaxspeed.traced_loss.loss import Loss
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.train.program import Program
from jaxspeed.train_state.staged_init import compile_ahead
from jaxspeed.train_state.state import Arrays, TrainState
from jaxspeed.user_models.batches import with_extra

# Of a device's memory; the rest is for caches, activations and temporary arrays. A forward pass
# needs 2% to 33% of a step's (gpt2_small and llama3_8b on TPUs), so it fits where the step does.
SHARE = 0.5


class ModelState(NamedTuple):
    """What a call of the model reads of a train state."""

    sources: Arrays
    variables: Arrays
    step: Any

    @classmethod
    def of(cls, program: Program, state: TrainState) -> "ModelState":
        return cls(state.sources(program.table), state.variables, state.step)

    def with_values(self, sources: Arrays, variables: Arrays) -> "ModelState":
        """The state with these in place of its own."""
        return self._replace(
            sources={**self.sources, **sources}, variables={**self.variables, **variables}
        )


def part_of_machine(program: Program) -> int:
    """A simulated device's part of this machine's memory, in bytes; on several hosts less."""
    return memory_of_machine() // len(program.devices)


@dataclass(frozen=True)
class GatherOnce:
    """Parameters as layers read them, if those and the train state fit into a share of memory.

    And the squared norms of the weights that have adapters with DoRA.
    """

    program: Program
    memory: int | None = None  # bytes of a device; None: its part of this machine's

    @cached_property
    def table(self) -> PlacementTable:
        """The placement of the parameters that calls read."""
        stored = self.program.table
        rows = {row.path: replace(row, param=row.read, master=None) for row in stored}
        gathered = replace(stored, rows=rows)
        needed = sum(device for _, device in stored.bytes_by_role().values())
        needed += gathered.bytes_by_role()["param"][1]
        memory = part_of_machine(self.program) if self.memory is None else self.memory
        return gathered if needed <= SHARE * memory else stored

    @cached_property
    def shapes(self) -> ModelState:
        """Shapes, dtypes and shardings of what a call returns."""
        state, table, gathered = ModelState.of(self.program, self.program.state), self.table, {}
        replicated = NamedSharding(self.program.mesh, PartitionSpec())
        squares = {
            adapter.leaf("squares"): jax.ShapeDtypeStruct(
                adapter.outputs, jnp.float32, sharding=replicated
            )
            for adapter in self._traced_loss.measured.values()
        }
        for path in self.gathered:
            at = table[path].source
            gathered[path] = jax.ShapeDtypeStruct(
                table[path].shape(at), at.dtype, sharding=table.sharding(at)
            )
        return state.with_values(gathered, squares)

    @property
    def gathers(self) -> bool:
        """Whether there is something to gather, and it fits, or to compute once."""
        return bool(self._read)

    def __call__(self, state: ModelState) -> ModelState:
        if not self._read:
            return state
        gathered = self._gather({path: state.sources[path] for path in self._read})
        return state.with_values(*gathered)

    def compile_ahead(self) -> Callable[[], Any]:
        """Start to compile it in the background; what is returned waits for that."""
        if not self._read:
            return lambda: None
        sources = self.program.state.sources(self.program.table)
        read_sources = {path: sources[path] for path in self._read}
        return compile_ahead(self.program.mesh, self._gather, read_sources)

    @cached_property
    def evaluate(self) -> Any:
        """`Program.evaluate`, of a gathered state."""
        traced_loss = self._traced_loss

        def loss_of(state: ModelState, batch: Any) -> Loss:
            variables, batch = with_extra(state.variables, batch)
            return traced_loss(state.sources, variables, batch, state.step, 0, False)[0]

        return self.program.evaluation(loss_of)

    @cached_property
    def _traced_loss(self) -> MicroBatchLoss:
        return self.program.traced_loss.stored_as(self.table)

    @cached_property
    def gathered(self) -> list[str]:
        """The parameters that are gathered once."""
        return [row.path for row in self.program.table if row.source != self.table[row.path].source]

    @cached_property
    def _read(self) -> list[str]:
        """The parameters that are gathered or measured."""
        parameters = self.table.parameters
        measured = (row.path for path in self._traced_loss.measured for row in parameters[path])
        return list(dict.fromkeys((*self.gathered, *measured)))

    @cached_property
    def _gather(self) -> Any:
        """(the gathered parameters, the squared norms), from the stored parameters."""
        program, table = self.program, self.table

        def gather(sources: Arrays) -> tuple[Arrays, Arrays]:
            gathered = {}
            for path in self.gathered:
                row = program.table[path]
                source = program.traced_loss.given(row, sources[path])
                gathered[path] = pad(
                    program.traced_loss.stored(row).read(source), row.shape(row.read)
                )
            return gathered, self._traced_loss.with_squares({**sources, **gathered}, {})

        places = {path: table.sharding(table[path].source) for path in self.gathered}
        replicated = NamedSharding(program.mesh, PartitionSpec())
        return jax.jit(program.in_mesh(gather), out_shardings=(places, replicated))
