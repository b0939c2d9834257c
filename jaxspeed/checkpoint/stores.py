"""Storage of checkpoints on file systems and in buckets, with atomic commit."""

import contextlib
import os
import shutil
import time
from typing import Protocol

from etils import epath

from jaxspeed.checkpoint import manifest
from jaxspeed.errors import CheckpointError

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
    """A file system: written to a temporary folder, renamed on commit."""

    def __init__(self, root: epath.Path) -> None:
        self.root = root

    def begin(self, tag: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.recover()
        for left in self._folders((_WRITING, _REMOVED)):
            left.rmtree()
        self.writing(tag).mkdir()

    def writing(self, tag: str) -> epath.Path:
        return self.root / f"{tag}{_WRITING}"

    def commit(self, tag: str) -> None:
        final = self.root / tag
        _sync(self.writing(tag))
        if final.exists():
            final.rename(self.root / f"{tag}{_REMOVED}")
        self.writing(tag).rename(final)
        _sync(self.root)
        for left in self._folders((_REMOVED,)):
            left.rmtree()

    def recover(self) -> None:
        for left in self._folders((_WRITING,)):
            final = self.root / left.name.removesuffix(_WRITING)
            if (left / manifest.NAME).exists() and not final.exists():
                left.rename(final)

    def abandon(self, tag: str) -> None:
        gone = 0
        for _ in range(100):  # writes in flight may create the folder again
            gone = 0 if self.writing(tag).exists() else gone + 1
            if gone > 6:
                return
            shutil.rmtree(self.writing(tag), ignore_errors=True)
            time.sleep(0.05)

    def remove(self, tag: str) -> None:
        removed = (self.root / tag).rename(self.root / f"{tag}{_REMOVED}")
        epath.Path(removed).rmtree()

    def tags(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return [f.name for f in self.root.iterdir() if f.is_dir() and _is_tag(f.name)]

    def unfinished(self) -> list[str]:
        return [f.name.removesuffix(_WRITING) for f in self._folders((_WRITING,))]

    def _folders(self, ends: tuple[str, ...]) -> list[epath.Path]:
        if not self.root.is_dir():
            return []
        return [f for f in self.root.iterdir() if f.is_dir() and f.name.endswith(ends)]


class ObjectStore:
    """A bucket, which cannot rename: complete is what has a manifest, which is written last."""

    def __init__(self, root: epath.Path) -> None:
        self.root = root

    def begin(self, tag: str) -> None:
        if (self.root / tag).exists():
            self.remove(tag)
        (self.root / tag).mkdir(parents=True, exist_ok=True)

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
        if not self.root.is_dir():
            return []
        folders = [f for f in self.root.iterdir() if f.is_dir() and _is_tag(f.name)]
        return [f.name for f in folders if (f / manifest.NAME).exists()]

    def unfinished(self) -> list[str]:
        if not self.root.is_dir():
            return []
        complete = set(self.tags())
        return [f.name for f in self.root.iterdir() if f.is_dir() and f.name not in complete]


Place = str | os.PathLike[str] | LocalStore | ObjectStore


def store_at(folder: Place) -> LocalStore | ObjectStore:
    """The store for a path: an ObjectStore for a URL such as gs:// or s3://."""
    if isinstance(folder, (LocalStore, ObjectStore)):
        return folder
    path = epath.Path(folder)
    return (
        LocalStore(path.expanduser().absolute()) if manifest.is_local(path) else ObjectStore(path)
    )


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
    if not manifest.is_local(root):
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.write_bytes(b"jaxspeed")
        probe.unlink()
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


def _sync(folder: epath.Path) -> None:
    """Sync the folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
