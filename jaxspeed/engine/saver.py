"""The engine's checkpoints: one Checkpointer for each folder that was saved to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspeed.checkpoint import Checkpointer, Restored
from jaxspeed.checkpoint.other_adapters import OtherAdapter
from jaxspeed.data.tokenizer import files_of
from jaxspeed.interop.pretrained import tokenizer_of
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState


class Saver:
    """DeepSpeed's words, on Checkpointers that live as long as the engine."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._open: dict[str, Checkpointer] = {}

    def save(
        self,
        state: TrainState,
        directory: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        exclude_frozen: bool,
        adapter: str,
        adapters: Mapping[str, OtherAdapter],
    ) -> str:
        tokenizer = tokenizer_of(self._program.model.weights)
        return self._at(directory).save(
            self._program,
            state,
            tag=tag,
            client_state=client_state,
            files=files_of(tokenizer),
            exclude_frozen=exclude_frozen,
            adapter=adapter,
            adapters=adapters,
        )

    def load(
        self,
        directory: str | Path,
        tag: str | None,
        weights_only: bool,
        renames: Mapping[str, str] | None,
        in_place_of: TrainState | None,
        frozen_as_read: bool,
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
            frozen_as_read=frozen_as_read,
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
