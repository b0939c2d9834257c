"""The engine's checkpoints: one Checkpointer for each folder that was saved to."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.checkpoint import Checkpointer, Restored
from jaxspeed.data.tokenizer import files_of
from jaxspeed.engine.loaded_adapters import LoadedAdapters
from jaxspeed.errors import CheckpointError
from jaxspeed.interop.pretrained import tokenizer_of
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState

log = logging.getLogger("jaxspeed")
_REPLACED = "they were assigned, or restored from a checkpoint that had them"
_NOT_READ = "they were not read from a folder (model.pretrained)"


class Saver:
    """DeepSpeed's words, on Checkpointers that live as long as the engine.

    Attributes:
      frozen_as_read: whether the frozen parameters are those of the folder that the model is read
        from, so that a checkpoint may leave them out.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._open: dict[str, Checkpointer] = {}
        self.frozen_as_read, self._warned = self._is_read, False

    @property
    def _is_read(self) -> bool:
        """Whether the model is read from a folder, which can be read again."""
        weights = self._program.model.weights
        return weights is not None and weights.origin is not None and self._program.on_one_mesh

    def initialized(self) -> None:
        """Note that the state is a fresh one."""
        self.frozen_as_read = self._is_read

    def restored(self, restored: Restored) -> None:
        """Note that the state is that of a checkpoint."""
        self.frozen_as_read = restored.frozen_as_read and self._is_read

    def replaced(self, before: TrainState, after: TrainState) -> None:
        """Note that another state was assigned."""
        frozen = [row.path for row in self._program.table if not row.leaf.trainable]
        old, new = (
            [*map(id, jax.tree.leaves([state.params.get(path) for path in frozen]))]
            for state in (before, after)
        )
        self.frozen_as_read &= old == new

    def excludes_frozen(self, asked: bool | None = None) -> bool:
        """Whether a checkpoint has only what is trained; `asked` is the argument of a save."""
        if asked is not None:
            if asked and not self.frozen_as_read:
                raise CheckpointError(
                    "exclude_frozen_parameters: the frozen parameters could not be read again: "
                    + (_REPLACED if self._is_read else _NOT_READ)
                )
            return asked
        asked = self._program.config.checkpoint.exclude_frozen_parameters
        if asked is None:
            asked = isinstance(self._program.model, AdaptedModel)
        if asked and self._is_read and not self.frozen_as_read and not self._warned:
            log.warning("checkpoints have the frozen parameters too: %s", _REPLACED)
            self._warned = True
        return asked and self.frozen_as_read

    def save(
        self,
        state: TrainState,
        directory: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        exclude_frozen: bool | None,
        adapters: LoadedAdapters,
    ) -> str:
        in_use = adapters.in_use("save_checkpoint")
        tokenizer = tokenizer_of(self._program.model.weights)
        return self._at(directory).save(
            self._program,
            state,
            tag=tag,
            client_state=client_state,
            files=files_of(tokenizer),
            exclude_frozen=self.excludes_frozen(exclude_frozen),
            adapter=in_use,
            adapters=adapters.others,
        )

    def load(
        self,
        directory: str | Path,
        tag: str | None,
        weights_only: bool,
        renames: Mapping[str, str] | None,
        in_place_of: TrainState | None,
    ) -> Restored | None:
        """None where nothing was ever saved there to its end."""
        there = self._at(directory)
        there.wait()
        if there.is_empty() and tag is None:
            return None
        return there.restore(
            self._program,
            tag=tag,
            weights_only=weights_only,
            renames=renames,
            in_place_of=in_place_of,
            frozen_as_read=self.frozen_as_read,
        )

    def wait(self) -> None:
        for checkpointer in self._open.values():
            checkpointer.wait()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _at(self, directory: str | Path) -> Checkpointer:
        name = str(directory)
        if name not in self._open:
            self._open[name] = Checkpointer(directory)
        return self._open[name]
