"""A process's scratch folder on a disk; those of dead processes are removed."""

import contextlib
import os
import secrets
import weakref
from pathlib import Path

from jaxspeed.disk.locked_folder import lock_is_free, lock_mark, remove_marked
from jaxspeed.errors import DiskError

PREFIX, MARK = "jaxspeed-state-", ".lock"


class Scratch:
    """A folder of mode 700 under `root`, removed by `close` or at exit.

    What a killed process has left is removed by the next one that has a folder there. A folder
    whose mark is locked, or that another user owns, is left alone.

    Raises:
      DiskError: the folder cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], rank: int = 0) -> None:
        self.root = Path(root).expanduser().absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            remove_dead(self.root)
            self.folder, mark = _locked_folder(self.root, rank)
        except OSError as error:
            raise DiskError(
                f"nvme_path {self.root}: no folder for the state can be created there "
                f"({error.strerror or error}); name a folder of a local disk that can be written to"
            ) from error
        self._end = weakref.finalize(self, _remove, self.folder, mark, os.getpid())

    def close(self) -> None:
        self._end()


def remove_dead(root: Path) -> None:
    """Remove the scratch folders under `root` whose processes have died."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # removed by another process meanwhile
            if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
                continue
            if not os.path.lexists(folder / MARK):
                folder.rmdir()  # if it is empty: its process was killed before it had a mark
            elif lock_is_free(folder, MARK, without_locks=False):
                remove_marked(folder, MARK)


def _locked_folder(root: Path, rank: int) -> tuple[Path, int]:
    """A new folder, and its locked mark."""
    while True:
        folder = root / f"{PREFIX}{rank}-{secrets.token_hex(6)}"
        folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # removed as dead, before it was locked
            mark = lock_mark(folder, MARK)
            if os.path.samestat(os.fstat(mark), os.stat(folder / MARK)):
                return folder, mark
            os.close(mark)


def _remove(folder: Path, mark: int, process: int) -> None:
    if os.getpid() == process:  # not in a process that was forked from it
        with contextlib.suppress(OSError):
            remove_marked(folder, MARK)
        os.close(mark)
