"""The run folder: its files, the lock, and run.json, which identifies the run."""

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from jaxspeed.config.verdicts import shortened
from jaxspeed.errors import ConfigError

WHOSE = "run.json"
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
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        """Take a lock that the system releases when the process ends in any way."""
        lock = open(self.path / ".lock", "w")  # noqa: SIM115  (held until close)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"run.output: {self.path} is in use by another run; wait for it, or close it"
            ) from None
        except OSError:  # a file system without locks
            pass
        self._lock = lock


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + PART)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
