"""The folder of a run and that of its checkpoints: what is in them, and whose they are."""

import contextlib
import json
from collections.abc import Mapping
from os.path import realpath
from pathlib import Path
from typing import Any

from etils import epath

from jaxspeed.checkpoint.stores import LocalStore, Place, store_at
from jaxspeed.checkpoint.verification import written_tags
from jaxspeed.config.parse import RUN_CONFIG
from jaxspeed.errors import ConfigError
from jaxspeed.run.claim import LOCK, PART, WHOSE, Claim


class RunFolder:
    """The files of one run; a second process or another run in its folders is refused.

    Args:
      path: the folder of its metrics and pictures.
      checkpoints: a folder, or a URL, by default in `path`. Runs with other outputs may name it as
        well, so that it has a lock and an identity of its own.
    """

    def __init__(self, path: str | Path, checkpoints: Place | None = None) -> None:
        self.path = Path(path)
        self.checkpoints: Place = checkpoints or self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.picture = self.path / "loss.svg"
        self.profile = self.path / "profile"
        self.adapter = self.path / "adapter"
        self.computed = self.path / "computed"  # arrays of the data's rows
        self._claims: list[Claim] = []
        self._written: list[tuple[Claim, str]] = []  # by `open`, of a new run

    def open(self, whose: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Lock the folders for the run that `whose` describes, and write its files.

        Raises:
          ConfigError: one cannot be written, another process uses it, or it holds another run.
        """
        store = store_at(self.checkpoints)
        output = kept = Claim("run.output", LocalStore(epath.Path(self.path)))
        if not isinstance(store, LocalStore) or realpath(store.root) != realpath(self.path):
            kept = Claim("run.checkpoints", store)
        self._claims = [output, kept]
        kept.watch()  # while `output` waits, where both were in use on a host that has died
        try:
            output.take()
            begun = output.holds(whose)
            if not begun:
                self._refuse_other_files(files)
            # Both are compared before one is written: a run that is refused leaves no identity.
            if kept.has():
                kept.take()
                if not kept.holds(whose) and not begun and written_tags(store):
                    raise ConfigError(
                        f"run.checkpoints: {kept.folder} holds checkpoints of an unknown run (it "
                        f"has no {WHOSE}); choose another folder, with run.init_from to start from "
                        "their weights, or the run.output of that run to continue it"
                    )
            if not begun:
                self._written = [(output, name) for name in (*files, WHOSE, RUN_CONFIG, LOCK)]
                if not kept.has(WHOSE):
                    self._written += [(kept, name) for name in (WHOSE, LOCK)]
                for name, data in files.items():
                    output.write(name, data)
                output.identify(whose)
            kept.take()
            kept.identify(whose)
        except BaseException:
            self.close()
            raise

    def store(self, config: Mapping[str, Any]) -> None:
        """Write the config, which may change: run.json alone identifies the run."""
        self._claims[0].write(RUN_CONFIG, _as_yaml(config))

    def withdraw(self) -> None:
        """Remove what `open` wrote of a new run, which is refused before it begins."""
        written = self._written
        self.close()
        for claim, name in written:
            with contextlib.suppress(OSError):
                (claim.folder / name).unlink(missing_ok=True)
        for claim in reversed(dict.fromkeys(claim for claim, _ in written)):
            with contextlib.suppress(OSError):  # which is not empty
                claim.folder.rmdir()

    def check(self) -> None:
        """Raise RunError if a folder has been removed since it was opened."""
        for claim in self._claims:
            claim.check()

    def _refuse_other_files(self, files: Mapping[str, bytes]) -> None:
        ours = [LOCK, *files, *(name + PART for name in (WHOSE, *files))]
        others = [f.name for f in self.path.iterdir() if f.name not in ours]
        if others:
            raise ConfigError(
                f"run.output: {self.path} holds other files ({', '.join(sorted(others)[:3])}); "
                "choose an empty folder"
            )

    def has_begun(self) -> bool:
        """Whether the folder holds a run."""
        try:
            return (self.path / WHOSE).exists()
        except OSError as error:
            raise ConfigError(f"run.output: {error.strerror}: {self.path}") from None

    def differs_in(self, **said: Any) -> bool:
        """Whether the run of the checkpoints differs in any of these values."""
        for store in (store_at(self.checkpoints), LocalStore(epath.Path(self.path))):
            with contextlib.suppress(ConfigError):
                before = Claim("run.checkpoints", store).identity()
                if before is not None:
                    return any(name in before and before[name] != x for name, x in said.items())
        return False

    def close(self) -> None:
        """Release the folders."""
        while self._claims:
            self._claims.pop().release()
        self._written = []


_HEAD = "# The config of this run, with overrides, as it was last started. A command that takes a\n"
_HEAD += "# config also takes this folder.\n"


def _as_yaml(config: Mapping[str, Any]) -> bytes:
    import yaml

    plain = json.loads(json.dumps(config, default=str))
    return (_HEAD + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)).encode()
