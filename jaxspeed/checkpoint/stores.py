"""Where checkpoints lie, and how one becomes visible only when it is whole."""

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
    """A place for checkpoints, each a folder with its tag's name."""

    root: epath.Path

    def writing(self, tag: str) -> epath.Path:
        """The folder that this checkpoint is written to."""

    def begin(self, tag: str) -> None:
        """Makes that folder, empty."""

    def commit(self, tag: str) -> None:
        """Makes what was written, its manifest last, the checkpoint of that tag."""

    def recover(self) -> None:
        """Finishes a commit that was cut short when all was written."""

    def abandon(self, tag: str) -> None:
        """Forgets what was written, as far as that works."""

    def remove(self, tag: str) -> None: ...

    def tags(self) -> list[str]:
        """Of what is there, whole or not."""

    def unfinished(self) -> list[str]:
        """The tags of saves that were cut short."""


class LocalStore:
    """A file system: written beside, renamed when whole."""

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
        whole = self.root / tag
        _sync(self.writing(tag))
        if whole.exists():
            whole.rename(self.root / f"{tag}{_REMOVED}")
        self.writing(tag).rename(whole)
        _sync(self.root)
        for left in self._folders((_REMOVED,)):
            left.rmtree()

    def recover(self) -> None:
        for left in self._folders((_WRITING,)):
            whole = self.root / left.name.removesuffix(_WRITING)
            if (left / manifest.NAME).exists() and not whole.exists():
                left.rename(whole)

    def abandon(self, tag: str) -> None:
        gone = 0
        for _ in range(100):  # writes that are under way may make the folder anew
            gone = 0 if self.writing(tag).exists() else gone + 1
            if gone > 6:
                return
            shutil.rmtree(self.writing(tag), ignore_errors=True)
            time.sleep(0.05)

    def remove(self, tag: str) -> None:
        away = (self.root / tag).rename(self.root / f"{tag}{_REMOVED}")
        epath.Path(away).rmtree()

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
    """A bucket, which cannot rename: whole is what has a manifest, and that is written last."""

    def __init__(self, root: epath.Path) -> None:
        self.root = root

    def begin(self, tag: str) -> None:
        if (self.root / tag).exists():
            self.remove(tag)
        (self.root / tag).mkdir(parents=True, exist_ok=True)

    def writing(self, tag: str) -> epath.Path:
        return self.root / tag

    def commit(self, tag: str) -> None:
        """Its manifest was written: that is all."""

    def recover(self) -> None:
        """A manifest is there or it is not."""

    def abandon(self, tag: str) -> None:
        with contextlib.suppress(Exception):
            if tag not in self.tags():
                self.remove(tag)

    def remove(self, tag: str) -> None:
        # Without its manifest first, so that no half of it can pass for whole.
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
        whole = set(self.tags())
        return [f.name for f in self.root.iterdir() if f.is_dir() and f.name not in whole]


Place = str | os.PathLike[str] | LocalStore | ObjectStore


def store_at(folder: Place) -> LocalStore | ObjectStore:
    """The store for a path: a bucket's where it is a URL, as gs:// or s3://."""
    if isinstance(folder, (LocalStore, ObjectStore)):
        return folder
    path = epath.Path(folder)
    return (
        LocalStore(path.expanduser().absolute()) if manifest.is_local(path) else ObjectStore(path)
    )


def check_tag(tag: str) -> str:
    """CheckpointError unless a tag can be a folder's name."""
    if (
        isinstance(tag, str)
        and _is_tag(tag)
        and not set(tag) & set('/\\:*?"<>|\0')
        and len(tag) < 200
    ):
        return tag
    raise CheckpointError(
        f"tag {tag!r}: it becomes a folder's name; use letters, digits, '-', '_' and '.', as in "
        "'best' or 'step-00000100'"
    )


def check_writable(root: epath.Path, nbytes: int = 0) -> None:
    """CheckpointError unless a checkpoint of so many bytes can be written there."""
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
    """Until the disk has the folder's own entries."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
