"""Saving and restoring the states of one run: what the engine and the run loop hold."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from etils import epath

from jaxspeed.checkpoint.catalog import (
    CheckpointInfo,
    checkpoints,
    default_tag,
    existing,
    superfluous,
)
from jaxspeed.checkpoint.header import (
    FILES,
    Header,
    as_json,
    check_client_state,
    header_of,
    read_header,
)
from jaxspeed.checkpoint.header import NAME as HEADER
from jaxspeed.checkpoint.leaves import Arrays, kept_leaves
from jaxspeed.checkpoint.manifest import (
    dealt,
    files_of,
    read_manifest,
    sums_of,
    write_file,
    write_manifest,
)
from jaxspeed.checkpoint.orbax_arrays import FOLDER, ArrayFiles
from jaxspeed.checkpoint.process_agreement import Processes, is_first
from jaxspeed.checkpoint.restore import restore_state
from jaxspeed.checkpoint.snapshot import Snapshot, snapshotter
from jaxspeed.checkpoint.stores import Place, check_tag, check_writable, store_at
from jaxspeed.checkpoint.verification import check_sound, newest_sound, written
from jaxspeed.checkpoint.warm_start import restore_weights
from jaxspeed.errors import CheckpointError, JaxspeedError
from jaxspeed.objective.train_state import TrainState
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gave back."""

    state: TrainState
    tag: str
    step: int  # of the checkpoint; with weights alone the state's own begins at 0
    client_state: dict[str, Any]
    files: dict[str, bytes]
    notes: list[str] = field(default_factory=list)  # what was left out, rounded or begun anew


class Checkpointer:
    """The checkpoints of one folder. `save` returns once the state is copied; `wait` when written.

    With several processes, each makes the same calls in the same order. A process that ends without
    `wait` or `close` leaves its last save unmade.

    Args:
      folder: a path, or a gs:// or s3:// URL (or a store).
      keep: of the checkpoints with tags of the form `step-00000100` that many are kept, the newest;
        None keeps all. Those with other tags stay.
      keep_every: of those, the ones at multiples of so many steps are kept as well.
    """

    def __init__(
        self,
        folder: Place,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is {keep}; at least 1 is kept, or None for all")
        self._store = store_at(folder)
        self._keep, self._keep_every = keep, keep_every
        self._processes = Processes()
        self._saving = Processes()  # what the thread talks over; its turns are its own
        self._files = ArrayFiles()
        self._snapshot: tuple[Program, Any] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def folder(self) -> epath.Path:
        return self._store.root

    # -- saving ---------------------------------------------------------------------------------

    def check(self, program: Program) -> None:
        """CheckpointError unless the folder can be written to and has room for a checkpoint."""
        nbytes = sum(leaf.nbytes for leaf in kept_leaves(program).values())
        self._processes.first("looking", lambda: check_writable(self.folder, nbytes))

    def save(
        self,
        program: Program,
        state: TrainState,
        *,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> str:
        """Begins a checkpoint and returns its tag once the state may be used up.

        A save that is still being written is waited for; its failure is raised here.
        """
        self.wait()
        step = int(state.step)
        tag = check_tag(default_tag(step) if tag is None else tag)
        given = dict(files or {})
        for name in given:
            check_tag(name)
        check_client_state(client_state or {})
        header = header_of(program, tag, step, client_state or {}, sorted(given))
        with _told(self.folder, f"saving {tag}"):
            folder = self._begin(program, tag)
            try:
                copied = self._copied(program, state)
                if not copied.is_own:
                    self._files.begin(folder, copied.arrays)
            except BaseException:
                self._abandon(tag)
                raise
        self._thread = threading.Thread(
            target=self._finish,
            args=(folder, header, given, copied.arrays if copied.is_own else None),
            name="jaxspeed-save",
        )
        self._thread.start()
        return tag

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
          CheckpointError: the save failed; the checkpoints before it are as they were.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            with _told(self.folder, "saving"):
                raise failure

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._files.close()

    def _begin(self, program: Program, tag: str) -> epath.Path:
        tags = self._processes.together("agreeing on a tag", lambda: tag)
        if len(set(tags)) > 1:
            raise CheckpointError(f"the processes save under different tags: {sorted(set(tags))}")
        self.check(program)
        folder = self._store.writing(tag)

        def make() -> None:
            self._store.begin(tag)
            (folder / FOLDER).mkdir()

        self._processes.first("making a folder", make)
        return folder

    def _copied(self, program: Program, state: TrainState) -> Snapshot:
        if self._snapshot is None or self._snapshot[0] is not program:
            self._snapshot = (program, snapshotter(program))
        copied: Snapshot = self._snapshot[1](state)
        return copied

    def _finish(
        self, folder: epath.Path, header: Header, files: Mapping[str, bytes], arrays: Arrays | None
    ) -> None:
        """In a thread: what makes arrays a checkpoint; None where writing them has begun."""
        together = self._saving
        try:

            def write() -> None:
                if arrays is not None:
                    self._files.begin(folder, arrays)
                self._files.finish()

            together.together("writing arrays", write)

            def describe() -> None:
                self._files.merge(folder)
                # The order of checkpoints is that of their times, also where a clock was set back.
                last = max((info.time for info in checkpoints(self._store)), default=0.0)
                _describe(folder, replace(header, time=max(header.time, last + 1e-3)), files)

            together.first("describing", describe)

            def sums() -> Any:
                sizes = {name: (folder / name).stat().length for name in files_of(folder)}
                mine = dealt(sizes, jax.process_index(), jax.process_count())
                return sums_of(folder, mine)

            parts = together.together("reading back", sums)
            together.first("sealing", lambda: self._seal(folder, header.tag, parts))
        except BaseException as error:
            self._failure = error
            self._abandon(header.tag)
        else:
            self._files.end()

    def _seal(self, folder: epath.Path, tag: str, parts: list[dict[str, Any]]) -> None:
        write_manifest(folder, tag, {k: v for part in parts for k, v in part.items()})
        self._store.commit(tag)
        try:
            for old in superfluous(checkpoints(self._store), self._keep, self._keep_every):
                self._store.remove(old)
        except OSError as error:  # the new one is sound; the next save tries again
            log.warning("%s: an old checkpoint cannot be removed: %s", self.folder, error)

    def _abandon(self, tag: str) -> None:
        """What is half written must not keep a full disk full."""
        if is_first():
            self._store.abandon(tag)
        self._files.end()

    # -- looking --------------------------------------------------------------------------------

    def list(self) -> Sequence[CheckpointInfo]:
        """All of the folder, the newest last."""
        return checkpoints(self._store)

    def is_empty(self) -> bool:
        """Whether nothing was ever saved to its end; damaged checkpoints count as saved."""
        self._processes.first("recovering", self._store.recover)
        return not self._processes.first("listing", lambda: written(self._store))

    def latest(self) -> str | None:
        """The newest whose files are all there."""
        return next((info.tag for info in reversed(self.list()) if info.ok), None)

    # -- restoring ------------------------------------------------------------------------------

    def restore(
        self,
        program: Program,
        *,
        tag: str | None = None,
        weights_only: bool = False,
        renames: Mapping[str, str] | None = None,
        in_place_of: TrainState | None = None,
    ) -> Restored:
        """The state of a checkpoint, laid out as `program` wants it.

        Args:
          tag: which; None for the newest that is sound: a damaged one is named in a warning and
            passed over.
          weights_only: only parameters and statistics; the optimizer and the step begin anew, and
            the notes list what was left out on either side.
          renames: {path in the checkpoint: path in the model}, of parameters or of the folders
            that hold them; with `weights_only`.
          in_place_of: a state that is given up for this one: its memory is freed once the
            checkpoint is known to be sound and to fit, before any array is read.

        Raises:
          CheckpointError: there is none that is sound, or it is another model's.
        """
        if renames and not weights_only:
            raise CheckpointError(
                "renames go with weights_only=True: the optimizer's own state "
                "has no names that they could change"
            )
        self.wait()
        with _told(self.folder, "restoring"):
            if tag is None:
                tag = newest_sound(self._store, self._processes)
            else:
                check_sound(self._store, self._processes, existing(self._store, tag))
            folder = self.folder / tag

            def ready() -> None:
                for leaf in jax.tree.leaves(in_place_of):
                    leaf.delete()

            header = read_header(folder, read_manifest(folder))
            if weights_only:
                state, notes = restore_weights(program, folder, header, dict(renames or {}), ready)
            else:
                state, notes = restore_state(program, folder, header, ready)
            files = {name: (folder / FILES / name).read_bytes() for name in header.files}
        return Restored(state, tag, header.step, header.client_state, files, notes)


def _describe(folder: epath.Path, header: Header, files: Mapping[str, bytes]) -> None:
    if files:
        (folder / FILES).mkdir()
    for name, content in files.items():
        write_file(folder / FILES / name, content)
    write_file(folder / HEADER, as_json(header))


class _told:
    """Whatever goes wrong inside is a CheckpointError that names the folder."""

    def __init__(self, folder: epath.Path, doing: str) -> None:
        self._where = f"{folder}: {doing}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, JaxspeedError):
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(f"{self._where} failed: {text[0]}") from error
