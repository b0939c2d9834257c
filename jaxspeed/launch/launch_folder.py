"""The temporary folder of a launcher or an agent, and the removal of what killed ones left."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_PREFIX = "jaxspeed-launch-"
_LONGEST_PARENT = 70  # bytes, and 37 of jaxspeed-launch-*/coordinator: 107 is the most of a socket
_SECONDS_TO_LOCK = 60  # between the creation of a folder and its lock, at most


class LaunchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that its process holds a lock on, which ends with the process.

    No other user can enter it, and the path of a UNIX socket in it is short enough.

    Those of this user that nobody holds are removed: their processes were killed.
    """

    def __init__(self) -> None:
        parent = short_temporary_folder()
        for folder in Path(parent).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # held, or removed by another
                _remove_if_left(folder)
        super().__init__(prefix=_PREFIX, dir=parent)
        self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        super().cleanup()
        held, self._lock = self._lock, -1
        if held >= 0:
            os.close(held)


def short_temporary_folder() -> str:
    """The system's folder for temporary files; /tmp if its path is too long for sockets below."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _LONGEST_PARENT else "/tmp"


def _remove_if_left(folder: Path) -> None:
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or time.time() - status.st_mtime < _SECONDS_TO_LOCK:
        return
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
