"""The run folder: its files, the lock, and run.json, which identifies the run."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from jaxspeed.config.verdicts import shortened
from jaxspeed.errors import ConfigError

log = logging.getLogger("jaxspeed")
WHOSE = "run.json"
TOUCH_SECONDS = 10.0
PART = ".part"


class RunFolder:
    """The files of one run; a second process or another run in the same folder is refused."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.picture = self.path / "loss.svg"
        self.profile = self.path / "profile"
        self._lock: IO[str] | None = None

    def open(self, whose: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Lock the folder for the run that `whose` describes, and write its files.

        Raises:
          ConfigError: it cannot be written, another process uses it, or it holds another run.
        """
        begun = self.path / WHOSE
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            if not begun.exists():
                ours = [".lock", *files, *(name + PART for name in (WHOSE, *files))]
                others = [f.name for f in self.path.iterdir() if f.name not in ours]
                if others:
                    raise ConfigError(
                        f"run.output: {self.path} holds other files "
                        f"({', '.join(sorted(others)[:3])}); choose an empty folder"
                    )
                for name, data in files.items():
                    _write_atomically(self.path / name, data)
                _write_atomically(begun, f"{json.dumps(whose, indent=1, default=str)}\n".encode())
                return
            before = json.loads(begun.read_text())
        except OSError as error:
            raise ConfigError(
                f"run.output: {self.path} cannot be written: {error.strerror or error}"
            ) from None
        except json.JSONDecodeError:
            raise ConfigError(f"run.output: {begun} cannot be read as JSON; remove it") from None
        now = json.loads(json.dumps(dict(whose), default=str))

        def shown(of: Mapping[str, Any], key: str) -> str:
            return shortened(json.dumps(of.get(key)))

        differences = [
            f"  {key}: {shown(before, key)} there, {shown(now, key)} here"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if before.get("data") != now.get("data"):
            differences.append(
                "  (data: a digest of the data; source stdlib changes with Python's version)"
            )
        if differences:
            raise ConfigError(
                f"run.output: {self.path} holds another run, which differs in\n"
                + "\n".join(differences)
                + "\nChoose another folder, or remove this one."
            )

    def has_begun(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / WHOSE).exists()

    def differs_in(self, **said: Any) -> bool:
        """Whether the folder's run differs in any of these values."""
        try:
            before = json.loads((self.path / WHOSE).read_text())
        except (OSError, json.JSONDecodeError):
            return False
        return any(name in before and before[name] != value for name, value in said.items())

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._closed.set()
            with contextlib.suppress(OSError):
                os.truncate(self._lock.name, 0)  # nobody has to wait for it
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        """Take a lock that the system releases when the process ends in any way.

        Not every shared file system has locks between hosts, so the owner also touches the file,
        which another host watches for a while.
        """
        lock = open(self.path / ".lock", "a+")  # noqa: SIM115  (held until close)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"run.output: {self.path} is in use by another run; wait for it, or close it"
            ) from None
        except OSError:  # a file system without locks
            pass
        if owner := _owner_elsewhere(Path(lock.name)):
            lock.close()
            raise ConfigError(
                f"run.output: {self.path} is in use by another run, on {owner}; wait for it, or "
                "close it"
            )
        Path(lock.name).write_text(socket.gethostname())
        self._lock, self._closed = lock, threading.Event()
        args = (lock.name, self._closed)
        threading.Thread(target=_touch, args=args, name="jaxspeed-lock", daemon=True).start()


def _touch(path: str, closed: threading.Event) -> None:
    while not closed.wait(TOUCH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _owner_elsewhere(path: Path) -> str | None:
    """The other host that owns the lock, if it touches the file; an owner that died does not."""
    host = path.read_text()
    if host in ("", socket.gethostname()):  # of this host the system's lock knows
        return None
    log.info("%s was in use on %s; waiting to see whether it still is", path.parent, host)
    before, deadline = path.stat().st_mtime_ns, time.monotonic() + 3 * TOUCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(TOUCH_SECONDS / 20)
        if path.stat().st_mtime_ns != before:
            return host
    return None


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + PART)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
