"""A run's claim to a folder or bucket: a lock, and run.json, which identifies the run."""

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from jaxspeed.checkpoint.object_storage import first_line, key_values_spec, new_context
from jaxspeed.checkpoint.stores import LocalStore, ObjectStore
from jaxspeed.config.tree import given_leaves
from jaxspeed.config.verdicts import shortened
from jaxspeed.errors import ConfigError, JaxspeedError, RunError

log = logging.getLogger("jaxspeed")
WHOSE, LOCK = "run.json", ".lock"
TOUCH_SECONDS = 10.0
PART = ".part"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each value that differs, with the part of it that does."""
    there, here = (
        {key: value for key, value in given_leaves(tree) if value is not None}
        for tree in (before, now)
    )
    for key in sorted({*there, *here}):
        texts = [json.dumps(of[key]) if key in of else "not set" for of in (there, here)]
        if texts[0] == texts[1]:
            continue
        if shortened(texts[0]) == shortened(texts[1]):
            start = next((i for i, pair in enumerate(zip(*texts)) if len({*pair}) > 1), 20) - 20
            texts = [f"...{text[start:]}" for text in texts]
        yield "  {}: {} there, {} here".format(key, *map(shortened, texts))


class Claim:
    """The lock and the identity of the run in one folder; `key` names the folder in errors.

    A lock of the system is released when its process ends in any way. Buckets and some shared file
    systems have none between hosts, so the owner also touches the lock file, which others watch for
    a while before they take it. A bucket's lock is only written if it is as it was last seen.
    """

    def __init__(self, key: str, store: LocalStore | ObjectStore) -> None:
        self._key, self.folder = key, store.root
        self._in_bucket = isinstance(store, ObjectStore)
        self._lock_file: int | None = None  # open, as is the folder: of a file system
        self._opened: int | None = None
        self._generation: Any = None  # of a bucket's lock, as it was last seen
        self._lost = False  # another run took it
        self._owner = ""  # what the lock file says while this claim has it
        self._watched: tuple[Any, float] | None = None  # what `_touched` was, and when
        self._closed = threading.Event()
        self._toucher: threading.Thread | None = None  # runs while this claim has the lock

    def watch(self) -> None:
        """Begin to see whether another host touches the lock, so that `take` waits less for it."""
        with contextlib.suppress(Exception):
            self._watched = self._touched(), time.monotonic()

    def take(self) -> None:
        """Lock the folder, which is created if need be; a second call does nothing.

        Raises:
          ConfigError: it cannot be written, or another run uses it.
        """
        if self._toucher is not None:
            return
        with self._errors():
            if not self._in_bucket:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._opened = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
                self._lock_file = self._open_lock()
                try:
                    fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._refuse("")
                except OSError:  # a file system without locks
                    pass
            if owner := self._owner_elsewhere():
                self._refuse(f", on {owner}")
            host = socket.gethostname()
            self._owner = f"{host} {uuid.uuid4().hex}" if self._in_bucket else host
            if not self._write_lock(self._owner):
                if not (owner := self._lock_text().partition(" ")[0]):
                    raise FileNotFoundError("The bucket does not exist")
                self._refuse(f", on {owner}")
        self._closed.clear()
        self._toucher = threading.Thread(target=self._touch, name="jaxspeed-lock", daemon=True)
        self._toucher.start()

    def check(self) -> None:
        """Raise RunError if the folder was removed, or became another's, since it was taken."""
        if self._lost:
            raise RunError(f"{self._key}: another run took {self.folder}; this one ends here")
        if self._opened is None:
            return
        try:
            intact = os.path.samestat(os.stat(self.folder), os.fstat(self._opened))
        except FileNotFoundError:
            intact = False
        except OSError:  # a file system that does not answer now
            intact = True
        if not intact:
            raise RunError(
                f"{self._key}: {self.folder} was removed while the run used it, and its files with "
                "it; the run ends here"
            )

    def has(self, name: str = "") -> bool:
        """Whether the folder, or a file in it, exists."""
        with self._errors():
            return (self.folder / name).exists()

    def identity(self) -> dict[str, Any] | None:
        """What run.json says; None if there is none."""
        with self._errors():
            file = self.folder / WHOSE
            try:
                return dict(json.loads(file.read_text())) if file.exists() else None
            except (ValueError, TypeError):
                what = f"{self._key}: {file} cannot be read as JSON; remove it"
                raise ConfigError(what) from None

    def holds(self, whose: Mapping[str, Any]) -> bool:
        """Whether the folder holds this run: False if it holds none.

        Raises:
          ConfigError: it holds another run; names what differs.
        """
        before, now = self.identity(), json.loads(json.dumps(dict(whose), default=str))
        if before is None:
            return False

        differences = list(_differences(before, now))
        if before.get("data") != now.get("data"):
            differences.append(
                "  (data: a digest of the data; source stdlib changes with Python's version)"
            )
        if differences:
            raise ConfigError(
                f"{self._key}: {self.folder} holds another run, which differs in\n"
                + "\n".join(differences)
                + "\nChoose another folder, or remove this one."
            )
        return True

    def identify(self, whose: Mapping[str, Any]) -> None:
        """Write run.json, unless it is there."""
        if not self.holds(whose):
            self.write(WHOSE, f"{json.dumps(whose, indent=1, default=str)}\n".encode())

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which appears when it is complete."""
        with self._errors():
            if self._in_bucket:
                (self.folder / name).write_bytes(data)
                return
            temporary = Path(self.folder / (name + PART))
            try:
                temporary.unlink(missing_ok=True)
                with temporary.open("xb") as file:  # never through a symlink
                    file.write(data)
                os.replace(temporary, self.folder / name)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    def release(self) -> None:
        if self._toucher is not None:
            self._closed.set()
            self._toucher.join()
            with contextlib.suppress(Exception):
                if not self._lost:  # nobody has to wait for it
                    self._write_lock("")
            self._toucher = None
        for descriptor in (self._lock_file, self._opened):
            if descriptor is not None:
                os.close(descriptor)
        self._lock_file = self._opened = None

    @property
    def _lock(self) -> epath.Path:
        return self.folder / LOCK

    def _open_lock(self) -> int:
        """Open the lock file, creating it if need be, but not the target of a symlink."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(self._lock, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ConfigError(f"{self._key}: {self._lock} is a symlink; remove it") from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ConfigError(f"{self._key}: {self._lock} is no regular file; remove it")
        return file

    @functools.cached_property
    def _bucket(self) -> Any:
        import tensorstore as ts

        return ts.KvStore.open(key_values_spec(self.folder), context=new_context()).result()

    def _lock_text(self) -> str:
        if self._lock_file is not None:
            return os.pread(self._lock_file, 4096, 0).decode(errors="replace")
        lock = self._bucket.read(LOCK).result()
        self._generation = lock.stamp.generation
        return str(lock.value, errors="replace")

    def _write_lock(self, text: str) -> bool:
        """Write the lock; False if another run did so in a bucket."""
        if self._lock_file is not None:
            os.ftruncate(self._lock_file, 0)
            os.pwrite(self._lock_file, text.encode(), 0)
            return True
        written = self._bucket.write(LOCK, text, if_equal=self._generation).result()
        if written.generation:
            self._generation = written.generation
        # The answer to an earlier request may have been lost.
        return bool(written.generation) or self._lock_text().startswith(self._owner)

    def _refuse(self, where: str) -> None:
        raise ConfigError(
            f"{self._key}: {self.folder} is in use by another run{where}; wait for it, or close it"
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Any other error is one of the folder; libraries of buckets have their own classes."""
        try:
            yield
        except JaxspeedError:
            raise
        except Exception as error:
            what = getattr(error, "strerror", None) or first_line(error)
            raise ConfigError(f"{self._key}: {self.folder} cannot be written: {what}") from None

    # -- owners on other hosts --------------------------------------------------------------------

    def _touch(self) -> None:
        for count in itertools.count():
            if self._closed.wait(TOUCH_SECONDS):
                return
            with contextlib.suppress(Exception):
                if self._lock_file is not None:
                    os.utime(self._lock_file)
                elif not self._write_lock(f"{self._owner} {count}"):
                    self._lost = True
                    return

    def _touched(self) -> Any:
        """What changes with each touch."""
        return self._lock_text() if self._in_bucket else os.lstat(self._lock).st_mtime_ns

    def _owner_elsewhere(self) -> str | None:
        """The other host that has the lock, if it touches the file; an owner that died does not."""
        host = self._lock_text().partition(" ")[0]
        if not host or (host == socket.gethostname() and not self._in_bucket):
            return None  # of this host the system's lock knows
        log.info("%s was in use on %s; waiting to see whether it still is", self.folder, host)
        before, since = self._watched or (self._touched(), time.monotonic())
        while self._touched() == before:
            if time.monotonic() > since + 3 * TOUCH_SECONDS:
                return None
            time.sleep(TOUCH_SECONDS / 20)
        return host
