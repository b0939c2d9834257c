"""Marks of folders: a file in the folder that its process locks for as long as it lives."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path


def lock_mark(folder: Path, mark: str) -> int:
    """Mark a folder as ours, and lock the mark until the returned file is closed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = os.open(folder / mark, flags, 0o644)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return opened


def lock_is_free(folder: Path, mark: str, *, without_locks: bool = True) -> bool:
    """Whether no process that is alive has the folder's mark locked.

    `without_locks` is the answer on a file system that has none.
    """
    try:
        opened = os.open(folder / mark, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:  # it is not ours to open
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    finally:
        os.close(opened)
    return True


def remove_marked(folder: Path, mark: str) -> None:
    """Remove a marked folder, the mark last: what is left if that is interrupted is known."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != mark:
            entry.unlink()
    shutil.rmtree(folder)
