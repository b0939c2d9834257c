"""Storage of checkpoints on file systems and in buckets, with atomic commit."""

import contextlib
import itertools
import logging
import os
import shutil
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from etils import epath

from jaxspeed.checkpoint import manifest
from jaxspeed.checkpoint.header import FILES
from jaxspeed.checkpoint.header import NAME as HEADER
from jaxspeed.checkpoint.object_storage import first_line, is_local, open_bucket
from jaxspeed.checkpoint.tensorstore_arrays import FOLDER as ARRAYS
from jaxspeed.disk.locked_folder import lock_is_free, lock_mark, remove_marked
from jaxspeed.errors import CheckpointError, JaxspeedError

log = logging.getLogger("jaxspeed")
_WRITING, _REMOVED = ".writing", ".removed"


class Store(Protocol):
    """A location of checkpoints, each a folder named by its tag."""

    root: epath.Path

    def writing(self, tag: str) -> epath.Path:
        """The folder that this checkpoint is written to."""

    def begin(self, tag: str) -> None:
        """Create that folder, empty."""

    def commit(self, tag: str) -> None:
        """Make the written files, the manifest last, the checkpoint of that tag."""

    def recover(self) -> None:
        """Finish a commit that was interrupted after all files were written."""

    def abandon(self, tag: str) -> None:
        """Remove the written files, as far as possible."""

    def remove(self, tag: str) -> None: ...

    def tags(self) -> list[str]:
        """The tags of committed checkpoints, damaged ones included."""

    def unfinished(self) -> list[str]:
        """The tags of interrupted saves."""


class LocalStore:
    """A file system: written to a temporary folder, renamed on commit.

    Only folders with this class's mark are removed. The writer holds a lock on the mark, so that a
    save in progress is distinguished from what a killed process has left.
    """

    def __init__(self, root: epath.Path) -> None:
        self.root = root
        self._marks: dict[str, int] = {}  # open files, by tag

    def begin(self, tag: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if tag in self._marks:  # an earlier save failed as it began
            self._release(tag)
        self.recover()
        for left in self._folders((_WRITING, _REMOVED)):
            if (left / manifest.MARK).exists() and lock_is_free(Path(left), manifest.MARK):
                _try_to_remove(Path(left))
        folder = Path(self.writing(tag))
        # Without a mark: a save was killed before it, or writes in flight came after its removal.
        is_folder = folder.is_dir() and not folder.is_symlink()
        if is_folder and {*os.listdir(folder)} <= {ARRAYS, FILES, HEADER}:
            shutil.rmtree(folder)
        try:
            folder.mkdir()
        except FileExistsError:
            raise CheckpointError(
                f"{folder} exists, and is of another process that saves, or of no save; remove or "
                "rename it"
            ) from None
        self._marks[tag] = lock_mark(folder, manifest.MARK)

    def writing(self, tag: str) -> epath.Path:
        return self.root / f"{tag}{_WRITING}"

    def commit(self, tag: str) -> None:
        final = Path(self.root / tag)
        _sync(self.writing(tag))
        before = self._set_aside(final) if os.path.lexists(final) else None
        self.writing(tag).rename(final)
        (final / manifest.MARK).unlink(missing_ok=True)
        self._release(tag)
        _sync(self.root)
        if before:
            _try_to_remove(before)

    def recover(self) -> None:
        for left in self._folders((_WRITING,)):
            final = self.root / left.name.removesuffix(_WRITING)
            if (
                (left / manifest.NAME).exists()
                and not final.exists()
                and lock_is_free(Path(left), manifest.MARK)
            ):
                left.rename(final)
                (final / manifest.MARK).unlink(missing_ok=True)

    def abandon(self, tag: str) -> None:
        if tag not in self._marks:
            return
        gone = 0
        for _ in range(100):  # writes in flight may create the folder again
            gone = 0 if self.writing(tag).exists() else gone + 1
            if gone > 6:
                break
            shutil.rmtree(self.writing(tag), ignore_errors=True)
            time.sleep(0.05)
        self._release(tag)

    def remove(self, tag: str) -> None:
        if aside := self._set_aside(Path(self.root / tag)):
            remove_marked(aside, manifest.MARK)

    def tags(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return [f.name for f in self.root.iterdir() if f.is_dir() and _is_tag(f.name)]

    def unfinished(self) -> list[str]:
        return [f.name.removesuffix(_WRITING) for f in self._folders((_WRITING,))]

    def _set_aside(self, final: Path) -> Path | None:
        """Rename a checkpoint so that it is none, and mark it; a symlink is removed."""
        if final.is_symlink():
            final.unlink()
            return None
        os.close(lock_mark(final, manifest.MARK))
        numbers = chain([""], (f"-{i}" for i in itertools.count(1)))
        names = (final.with_name(f"{final.name}{number}{_REMOVED}") for number in numbers)
        return final.rename(next(name for name in names if not os.path.lexists(name)))

    def _folders(self, ends: tuple[str, ...]) -> list[epath.Path]:
        if not self.root.is_dir():
            return []
        folders = [f for f in self.root.iterdir() if f.is_dir() and f.name.endswith(ends)]
        return [f for f in folders if not os.path.islink(f)]

    def _release(self, tag: str) -> None:
        os.close(self._marks.pop(tag))


class ObjectStore:
    """A bucket, which cannot rename: complete is what has a manifest, which is written last."""

    def __init__(self, root: epath.Path) -> None:
        open_bucket(root)
        self.root = root

    def begin(self, tag: str) -> None:
        if (self.root / tag).exists():
            self.remove(tag)
        (self.root / tag).mkdir(exist_ok=True)  # with parents it would create a bucket

    def writing(self, tag: str) -> epath.Path:
        return self.root / tag

    def commit(self, tag: str) -> None:
        """No-op: the written manifest is the commit."""

    def recover(self) -> None:
        """No-op: a manifest exists or it does not."""

    def abandon(self, tag: str) -> None:
        with contextlib.suppress(Exception):
            if tag not in self.tags():
                self.remove(tag)

    def remove(self, tag: str) -> None:
        # The manifest first, so that a partly removed checkpoint is never taken as complete.
        (self.root / tag / manifest.NAME).unlink(missing_ok=True)
        (self.root / tag).rmtree()

    def tags(self) -> list[str]:
        return [f.name for f in self._folders() if (f / manifest.NAME).exists()]

    def unfinished(self) -> list[str]:
        return [f.name for f in self._folders() if not (f / manifest.NAME).exists()]

    def _folders(self) -> list[epath.Path]:
        entries = self.root.iterdir() if self.root.is_dir() else ()
        return [f for f in entries if f.is_dir() and _is_tag(f.name)]


Place = str | os.PathLike[str] | LocalStore | ObjectStore


def checkpoints_of(folder: str | os.PathLike[str]) -> epath.Path:
    """The folder of checkpoints in that of a run, or the folder itself."""
    at = epath.Path(folder)
    open_bucket(at)
    with as_checkpoint_error(at, "reading"):
        return at / "checkpoints" if (at / "checkpoints").is_dir() else at


def store_at(folder: Place) -> LocalStore | ObjectStore:
    """The store for a path: an ObjectStore for a URL such as gs:// or s3://."""
    if isinstance(folder, (LocalStore, ObjectStore)):
        return folder
    path = epath.Path(folder)
    return LocalStore(path.expanduser().absolute()) if is_local(path) else ObjectStore(path)


class as_checkpoint_error:
    """Context that turns any other exception into a CheckpointError naming the folder."""

    def __init__(self, folder: epath.Path, doing: str) -> None:
        self._where = f"{folder}: {doing}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, JaxspeedError):
            raise CheckpointError(f"{self._where} failed: {first_line(error)}") from error


def check_tag(tag: str) -> str:
    """Raise CheckpointError unless a tag can be a folder name."""
    if (
        isinstance(tag, str)
        and _is_tag(tag)
        and not set(tag) & set('/\\:*?"<>|\0')
        and len(tag) < 200
    ):
        return tag
    raise CheckpointError(
        f"tag {tag!r}: not usable as a folder name; use letters, digits, '-', '_' and '.', as in "
        "'best' or 'step-00000100'"
    )


def check_writable(root: epath.Path, nbytes: int = 0) -> None:
    """Raise CheckpointError unless `nbytes` can be written under `root`."""
    if not is_local(root):
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=root) as probe:
            probe.write(b"jaxspeed")
            probe.flush()
    except OSError as error:
        raise CheckpointError(
            f"{root}: cannot be written to ({error.strerror or error}); choose another folder"
        ) from error
    free = shutil.disk_usage(root).free
    if free < nbytes:
        raise CheckpointError(
            f"{root}: a checkpoint needs {nbytes:,} bytes, and the disk has {free:,} free; free "
            f"{nbytes - free:,} bytes, keep fewer checkpoints, or choose another folder"
        )


def _is_tag(name: str) -> bool:
    return bool(name.strip()) and name[0] != "." and not name.endswith((_WRITING, _REMOVED))


def _try_to_remove(folder: Path) -> None:
    try:
        remove_marked(folder, manifest.MARK)
    except OSError as error:  # the next save tries again
        log.warning("%s cannot be removed: %s", folder, error)


def _sync(folder: epath.Path) -> None:
    """Sync the folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
