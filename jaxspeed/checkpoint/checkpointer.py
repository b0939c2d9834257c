"""`Checkpointer`: asynchronous saving, retention and restoring of the checkpoints of one folder.

docs/notes/verification.md has the reasons why this is not Orbax's `CheckpointManager`.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from etils import epath

from jaxspeed.checkpoint.catalog import (
    CheckpointInfo,
    checkpoints,
    default_tag,
    existing,
    tags_to_remove,
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
from jaxspeed.checkpoint.leaves import Arrays, SavedLeaf, frozen_leaves, saved_leaves
from jaxspeed.checkpoint.manifest import (
    checksums,
    problems_of,
    read_manifest,
    shares_of,
    sizes_of,
    write_file,
    write_manifest,
)
from jaxspeed.checkpoint.orbax_arrays import ArrayFiles
from jaxspeed.checkpoint.other_adapters import PREFIX as OTHERS
from jaxspeed.checkpoint.other_adapters import OtherAdapter, leaves_of_others
from jaxspeed.checkpoint.process_agreement import Processes, is_first
from jaxspeed.checkpoint.restore import check_base, restore_state
from jaxspeed.checkpoint.snapshot import Snapshot, snapshot_function
from jaxspeed.checkpoint.stores import (
    Place,
    as_checkpoint_error,
    check_tag,
    check_writable,
    store_at,
)
from jaxspeed.checkpoint.tensorstore_arrays import FOLDER, write_from_disk
from jaxspeed.checkpoint.verification import check_valid, newest_valid, written_tags
from jaxspeed.checkpoint.warm_start import restore_weights
from jaxspeed.errors import CheckpointError
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState

log = logging.getLogger("jaxspeed")


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint."""

    state: TrainState
    tag: str
    step: int  # of the checkpoint; with weights_only the state's step is 0
    client_state: dict[str, Any]
    files: dict[str, bytes]
    notes: list[str] = field(default_factory=list)  # what was skipped, rounded or reinitialized
    frozen_as_read: bool = False  # the frozen parameters are as they are where the model's are read
    adapter: str | None = None  # the one in use, of those that were loaded
    adapters: dict[str, OtherAdapter] = field(default_factory=dict)  # the others


class Checkpointer:
    """The checkpoints of one folder. `save` returns once the state is copied; `wait` when written.

    With several processes, each makes the same calls in the same order. A process that ends without
    `wait` or `close` loses its last save.

    Args:
      folder: a path, or a gs:// or s3:// URL (or a store).
      keep: number of checkpoints with tags of the form `step-00000100` to retain, the newest; None
        retains all. Those with other tags are never removed.
      keep_every: retain those at multiples of this many steps as well.
    """

    def __init__(
        self,
        folder: Place,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is {keep}; it is at least 1, or None to keep all")
        self._store = store_at(folder)
        self._keep, self._keep_every = keep, keep_every
        self._processes = Processes()
        self._saving = Processes()  # the thread's channel, with a count of rounds of its own
        self._files = ArrayFiles()
        self._snapshot: tuple[Program, set[str], Any] | None = None  # of a program's leaves
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._hold = ExitStack()  # of state on a disk, while it is written

    @property
    def folder(self) -> epath.Path:
        return self._store.root

    # -- saving ---------------------------------------------------------------------------------

    def check(self, program: Program, exclude_frozen: bool = False) -> None:
        """Raise CheckpointError unless the folder is writable and has space for a checkpoint."""
        nbytes = _nbytes(saved_leaves(program, exclude_frozen))
        self._processes.first("checking the folder", lambda: check_writable(self.folder, nbytes))

    def save(
        self,
        program: Program,
        state: TrainState,
        *,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        exclude_frozen: bool = False,
        adapter: str = "default",
        adapters: Mapping[str, OtherAdapter] | None = None,
    ) -> str:
        """Start a save; return its tag once the state may be donated.

        Waits for a save that is still being written, and raises its failure.

        Args:
          exclude_frozen: leave out parameters that are not trained, and record where the model's
            weights are read from: only if they are as they are there.
          adapter: the name of the adapter in use.
          adapters: those that are not, by name.
        """
        self.wait()
        step = int(state.step)
        tag = check_tag(default_tag(step) if tag is None else tag)
        contents = dict(files or {})
        for name in contents:
            check_tag(name)
        check_client_state(client_state or {})
        leaves = saved_leaves(program, exclude_frozen)
        others = {name: x.has_moments for name, x in (adapters or {}).items()}
        leaves |= leaves_of_others(leaves, program, others)
        excluded = frozen_leaves(program) if exclude_frozen else {}
        header = header_of(
            program, tag, step, client_state or {}, sorted(contents), leaves, excluded, adapter
        )
        with as_checkpoint_error(self.folder, f"saving {tag}"):
            folder = self._begin(tag, _nbytes(leaves))
            try:
                snapshot = self._take_snapshot(program, state, leaves, adapters or {})
                from_disk = None
                if (tier := program.update.tier) and snapshot.on_disk:
                    from_disk = partial(write_from_disk, folder, snapshot.on_disk, tier)
                    self._hold = tier.hold(step)
                begin = partial(self._files.begin, folder, snapshot.arrays, from_disk)
                if not snapshot.copied:
                    begin()
            except BaseException:
                self._abandon(tag)
                raise
        self._thread = threading.Thread(
            target=self._finish,
            args=(folder, header, contents, begin if snapshot.copied else None),
            name="jaxspeed-save",
        )
        self._thread.start()
        return tag

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
          CheckpointError: the save failed; earlier checkpoints are unchanged.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            with as_checkpoint_error(self.folder, "saving"):
                raise failure

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._files.close()

    def _begin(self, tag: str, nbytes: int) -> epath.Path:
        folder = self._store.writing(tag)

        def begin(tags: list[str]) -> None:
            if len(set(tags)) > 1:
                some = sorted(set(tags))[:9]
                raise CheckpointError(f"the processes save under different tags: {some}")
            check_writable(self.folder, nbytes)
            self._store.begin(tag)
            (folder / FOLDER).mkdir()

        self._processes.all("beginning to save", lambda: tag, begin)
        return folder

    def _take_snapshot(
        self,
        program: Program,
        state: TrainState,
        leaves: Mapping[str, SavedLeaf],
        adapters: Mapping[str, OtherAdapter],
    ) -> Snapshot:
        cached = self._snapshot
        if cached is None or cached[0] is not program or cached[1] != leaves.keys():
            self._snapshot = cached = program, set(leaves), snapshot_function(program, leaves)
        others = {
            f"{OTHERS}{adapter}/{name}": x
            for adapter, other in adapters.items()
            for name, x in other.arrays.items()
        }
        snapshot: Snapshot = cached[2](state, others)
        return snapshot

    def _finish(
        self,
        folder: epath.Path,
        header: Header,
        files: Mapping[str, bytes],
        begin: Callable[[], None] | None,
    ) -> None:
        """Write, verify and commit, in a thread; `begin` starts to write, if that has not begun."""
        processes = self._saving
        try:

            def write() -> None:
                if begin is not None:
                    begin()
                self._files.finish()
                self._hold.close()  # the next update may change what is on a disk

            def describe() -> list[list[str]]:
                self._files.merge(folder)
                # Checkpoints are ordered by time, even if the clock was set back.
                last = max((info.time for info in checkpoints(self._store)), default=0.0)
                _describe(folder, replace(header, time=max(header.time, last + 1e-3)), files)
                return shares_of(sizes_of(folder), jax.process_count())

            share = processes.share("writing arrays", write, describe)
            processes.all(
                "reading back",
                lambda: checksums(folder, share),
                lambda parts: self._commit(folder, header.tag, parts),
            )
        except BaseException as error:
            self._failure = error
            self._abandon(header.tag)
        else:
            self._files.end()

    def _commit(self, folder: epath.Path, tag: str, parts: list[dict[str, Any]]) -> None:
        write_manifest(folder, tag, {k: v for part in parts for k, v in part.items()})
        self._store.commit(tag)
        for old in tags_to_remove(checkpoints(self._store), self._keep, self._keep_every):
            try:
                self._store.remove(old)
            except Exception as error:  # the new one is valid; the next save tries again
                log.warning("%s: an old checkpoint cannot be removed: %s", self.folder, error)

    def _abandon(self, tag: str) -> None:
        """Remove a partial checkpoint, so that it does not fill the disk."""
        self._hold.close()
        if is_first():
            self._store.abandon(tag)
        self._files.end()

    # -- listing --------------------------------------------------------------------------------

    def list(self) -> Sequence[CheckpointInfo]:
        """All checkpoints of the folder, the newest last."""
        with as_checkpoint_error(self.folder, "listing"):
            return checkpoints(self._store)

    def is_empty(self) -> bool:
        """Whether no save was ever completed; damaged checkpoints count as completed."""
        with as_checkpoint_error(self.folder, "listing"):
            self._processes.first("recovering", self._store.recover)
            return not self._processes.first("listing", lambda: written_tags(self._store))

    def latest(self) -> str | None:
        """The newest complete checkpoint's tag."""
        return next((info.tag for info in reversed(self.list()) if info.ok), None)

    def files(self, tag: str) -> dict[str, bytes]:
        """The files that were saved with a checkpoint; none if one is damaged."""
        with as_checkpoint_error(self.folder, f"reading the files of {tag}"):
            folder = self.folder / tag
            manifest = read_manifest(folder)
            names = read_header(folder, manifest.format).files
            sums = {f"{FILES}/{name}": manifest.files.get(f"{FILES}/{name}") for name in names}
            if None in sums.values() or problems_of(folder, sums):  # type: ignore[arg-type]
                return {}
            return {name: (folder / FILES / name).read_bytes() for name in names}

    # -- restoring ------------------------------------------------------------------------------

    def restore(
        self,
        program: Program,
        *,
        tag: str | None = None,
        weights_only: bool = False,
        renames: Mapping[str, str] | None = None,
        in_place_of: TrainState | None = None,
        frozen_as_read: bool = False,
    ) -> Restored:
        """The state of a checkpoint, sharded as in `program`.

        Args:
          tag: the checkpoint; None for the newest valid one, with a warning for each damaged one
            that is skipped.
          weights_only: restore only parameters and statistics; the optimizer and the step are
            reinitialized, and the notes list what was skipped on either side.
          renames: {path in the checkpoint: path in the model}, of parameters or of their parent
            modules; with `weights_only`.
          in_place_of: a state to replace: its memory is freed once the checkpoint is known to be
            valid and to match, before any array is read.
          frozen_as_read: the frozen parameters of `in_place_of` are those of the folder that the
            model is read from, so that they are not read again where the checkpoint has none.

        Raises:
          CheckpointError: no checkpoint is valid, or it is of another model.
        """
        if renames and not weights_only:
            raise CheckpointError(
                "renames need weights_only=True: they do not apply to the optimizer's state"
            )
        self.wait()
        with as_checkpoint_error(self.folder, "restoring"):
            if tag is None:
                tag = newest_valid(self._store, self._processes)
            else:
                check_valid(self._store, self._processes, existing(self._store, tag))
            folder = self.folder / tag

            # The manifest grows with the processes that saved.
            form = self._processes.first("reading the format", lambda: read_manifest(folder).format)
            header = read_header(folder, form)
            if header.excluded:
                check = partial(check_base, folder, header, program.model.weights)
                self._processes.all("comparing the frozen parameters", check)
            kept: Arrays = {}
            if in_place_of is not None and header.excluded and frozen_as_read and not weights_only:
                kept = {
                    name: in_place_of.params[name.removeprefix("params/")]
                    for name in frozen_leaves(program)
                }

            def ready() -> None:
                keep = set(map(id, jax.tree.leaves(kept)))
                for leaf in jax.tree.leaves(in_place_of):
                    if id(leaf) not in keep:
                        leaf.delete()

            adapter, adapters = None, dict[str, OtherAdapter]()
            if weights_only:
                state, notes, as_read = restore_weights(
                    program, folder, header, dict(renames or {}), ready
                )
            else:
                state, adapters, notes = restore_state(program, folder, header, ready, kept)
                adapter, as_read = header.adapter, bool(header.excluded)
            files = {name: (folder / FILES / name).read_bytes() for name in header.files}
        return Restored(
            state,
            tag,
            header.step,
            header.client_state,
            files,
            notes,
            as_read,
            adapter,
            adapters,
        )


def _nbytes(leaves: Mapping[str, SavedLeaf]) -> int:
    return sum(leaf.nbytes for leaf in leaves.values())


def _describe(folder: epath.Path, header: Header, files: Mapping[str, bytes]) -> None:
    if files:
        (folder / FILES).mkdir()
    for name, content in files.items():
        write_file(folder / FILES / name, content)
    write_file(folder / HEADER, as_json(header))
