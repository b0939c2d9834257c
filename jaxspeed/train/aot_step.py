"""Ahead-of-time compiled step in a file, with the identity of what it was compiled for.

The file is a magic line, a line of JSON (the `Identity` and a digest of the rest), and the output
of `jax.experimental.serialize_executable`. That is a pickle: loading it runs code, so load only
files from sources you trust. One that another user could have written is refused, unless
`run.trust_executable` is set. The identity is plain JSON and is compared before the rest is read.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax

from jaxspeed.errors import ConfigError

MAGIC = b"jaxspeed executable 1\n"
PACKAGES = ("jaxspeed", "jax", "jaxlib", "libtpu")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
OPTIONS = (
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
)
# Flags that change no program: jaxspeed dumps the program's text when it compiles for a TPU.
_IDLE_FLAGS = "--xla_dump_"


@dataclass(frozen=True)
class Identity:
    """What must be equal where an executable was compiled and where it runs.

    Attributes:
      batch: the arrays of a batch, each as "dtype[shape]".
      program: digest of the lowered program: every operation, shape, sharding and donation.
      devices: in mesh order, each as "platform kind id".
      mesh: axis sizes.
      versions: of the packages that compiled it.
      machine: the CPU's instruction set, for programs of a CPU; otherwise empty.
      flags: compiler flags from the environment.
      options: JAX's compiler options, which a lowered program does not show.
    """

    batch: dict[str, str]
    program: str
    devices: tuple[str, ...]
    mesh: dict[str, int]
    versions: dict[str, str]
    machine: str
    flags: tuple[str, ...]
    options: dict[str, str]

    def differences(self, other: "Identity") -> list[str]:
        """The differing fields as text; `other` is the identity here."""
        return [
            f"{field.name} ({_short_text(theirs)} there, {_short_text(ours)} here)"
            for field in fields(self)
            if (theirs := getattr(self, field.name)) != (ours := getattr(other, field.name))
        ]


def identity_of(lowered: Any, devices: Sequence[Any], mesh: Any) -> Identity:
    """The identity of a lowered program on devices in mesh order."""
    on_cpu = devices[0].platform == "cpu"
    versions = {name: _version(name) for name in PACKAGES if name != "libtpu" or not on_cpu}
    (_, batch), _ = lowered.args_info
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    return Identity(
        batch={jax.tree_util.keystr(path): _array(info) for path, info in leaves},
        program=hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        devices=tuple(f"{d.platform} {d.device_kind} {d.id}" for d in devices),
        mesh={str(axis): int(size) for axis, size in mesh.shape.items()},
        versions={name: version for name, version in versions.items() if version},
        machine=_instructions() if on_cpu else "",
        flags=tuple(sorted(flag for flag in _flags() if not flag.startswith(_IDLE_FLAGS))),
        options={name: str(jax.config.values.get(name)) for name in OPTIONS},
    )


def write(path: Path, compiled: Any, identity: Identity) -> None:
    """Write a compiled program to a file.

    Raises:
      ConfigError: JAX cannot serialize it.
    """
    from jax.experimental import serialize_executable

    try:
        executable, _, _ = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--keep: this step cannot be saved: {reason}") from None
    head = {**asdict(identity), "sha256": hashlib.sha256(executable).hexdigest()}
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o644)  # whatever the umask, no other user may change it

    with open(part, "xb", opener=opener) as file:
        file.write(MAGIC + json.dumps(head).encode() + b"\n" + executable)
    part.replace(path)  # atomic: an existing file is complete


def read_identity(path: str | Path, *, trusted: bool = False) -> Identity:
    """The identity in a file.

    Args:
      trusted: whether the file may be one that other users can write.

    Raises:
      ConfigError: the file is missing, holds no executable, or is not trusted.
    """
    return _read_file(path, trusted)[0]


def load(path: str | Path, lowered: Any, devices: Sequence[Any], *, trusted: bool = False) -> Any:
    """The `jax.stages.Compiled` of a file whose identity equals that of `lowered` on these devices.

    Raises:
      ConfigError: the file has changed, is damaged, or is not trusted.
      JaxRuntimeError: the devices cannot load it.
    """
    from jax.experimental import serialize_executable

    _, executable = _read_file(path, trusted)
    return serialize_executable.deserialize_and_load(
        executable,
        jax.tree.structure(lowered.args_info),
        lowered.out_tree,
        backend=devices[0].client,
        execution_devices=list(devices),
    )


def _read_file(path: str | Path, trusted: bool) -> tuple[Identity, bytes]:
    try:
        with open(path, "rb") as file:
            if not trusted:
                _refuse_of_others(path, os.fstat(file.fileno()))
            content = file.read()
    except OSError as error:
        raise ConfigError(f"run.executable: {path}: {error.strerror or error}") from None
    if not content.startswith(MAGIC):
        raise ConfigError(
            f"run.executable: {path} holds no executable; `jaxspeed plan CONFIG --target TARGET "
            "--compile --keep FILE` writes one"
        )
    head, _, executable = content[len(MAGIC) :].partition(b"\n")
    try:
        values = json.loads(head)
        intact = values.pop("sha256") == hashlib.sha256(executable).hexdigest()
        values = {**values, "devices": tuple(values["devices"]), "flags": tuple(values["flags"])}
        identity = Identity(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise ConfigError(f"run.executable: {path} is damaged: write it again")
    return identity, executable


def _refuse_of_others(path: str | Path, status: os.stat_result) -> None:
    """Raise ConfigError if another user has written the file, or can."""
    if status.st_uid != os.geteuid():
        what = f"is owned by another user (uid {status.st_uid})"
        instead = "copy it"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
        instead = f"`chmod go-w {shlex.quote(str(path))}`"
    else:
        return
    raise ConfigError(
        f"run.executable: {path} {what}, and loading it runs the code that is in it. If you trust "
        f"the file, {instead}, or set run.trust_executable to true"
    )


def _array(info: Any) -> str:
    return f"{info.dtype}[{','.join(map(str, info.shape))}]"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flags() -> list[str]:
    return [flag for name in FLAGS for flag in os.environ.get(name, "").split()]


def _instructions() -> str:
    """A digest of this CPU's instruction set, where /proc/cpuinfo lists it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    text = " ".join([platform.machine(), *sorted(listed.split(":")[-1].split())])
    return f"{platform.machine()} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _short_text(value: Any) -> str:
    """A value as text that fits on a line."""
    if isinstance(value, dict):
        value = ", ".join(f"{key} {item}" for key, item in value.items())
    elif isinstance(value, tuple):
        value = f"{len(value)}: {', '.join(value[:3])}{', ...' if len(value) > 3 else ''}"
    text = str(value) or "none"
    return text if len(text) <= 120 else f"{text[:12]}..."
