"""A compiled step in a file, beside what says for what it was compiled.

The file is a line of magic, a line of JSON (the `Identity`, and a digest of what follows), and what
`jax.experimental.serialize_executable` makes of a compiled program. That is a pickle: loading one
runs what is in it, so a file is only to be loaded from whom one trusts. The identity is plain JSON
and is compared before anything of the rest is looked at.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
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
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
)
# Of our own: a TPU's compile writes its program's text into a folder.
_IDLE_FLAGS = "--xla_dump_"


@dataclass(frozen=True)
class Identity:
    """What has to be the same where an executable is to run.

    Attributes:
      batch: the arrays of a batch, each as "dtype[shape]".
      program: a digest of the lowered program: every operation, shape, sharding and donation.
      devices: in the mesh's order, each as "platform kind id".
      mesh: sizes of the axes.
      versions: of what made it.
      machine: the instructions that a CPU's program may use; empty where no CPU runs it.
      flags: of the compiler, by the environment.
      options: of JAX that the compiler is told and a lowered program does not show.
    """

    batch: dict[str, str]
    program: str
    devices: tuple[str, ...]
    mesh: dict[str, int]
    versions: dict[str, str]
    machine: str
    flags: tuple[str, ...]
    options: dict[str, str]

    def apart(self, other: "Identity") -> list[str]:
        """In words what is not the same, `other` being what is here."""
        return [
            f"{field.name} ({_shown(theirs)} there, {_shown(ours)} here)"
            for field in fields(self)
            if (theirs := getattr(self, field.name)) != (ours := getattr(other, field.name))
        ]


def identity_of(lowered: Any, devices: Sequence[Any], mesh: Any) -> Identity:
    """Of a lowered program on devices in the mesh's order."""
    on_cpu = devices[0].platform == "cpu"
    found = {name: _version(name) for name in PACKAGES if name != "libtpu" or not on_cpu}
    (_, batch), _ = lowered.args_info
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    return Identity(
        batch={jax.tree_util.keystr(path): _array(info) for path, info in leaves},
        program=hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        devices=tuple(f"{d.platform} {d.device_kind} {d.id}" for d in devices),
        mesh={str(axis): int(size) for axis, size in mesh.shape.items()},
        versions={name: version for name, version in found.items() if version},
        machine=_instructions() if on_cpu else "",
        flags=tuple(sorted(flag for flag in _flags() if not flag.startswith(_IDLE_FLAGS))),
        options={name: str(getattr(jax.config, name, None)) for name in OPTIONS},
    )


def write(path: Path, compiled: Any, identity: Identity) -> None:
    """Keep a compiled program.

    Raises:
      ConfigError: JAX cannot serialise it.
    """
    from jax.experimental import serialize_executable

    try:
        made, _, _ = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--keep: this step cannot be kept: {reason}") from None
    head = {**asdict(identity), "sha256": hashlib.sha256(made).hexdigest()}
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(MAGIC + json.dumps(head).encode() + b"\n" + made)
    part.replace(path)  # a file that is there is whole


def read_identity(path: str | Path) -> Identity:
    """For what a file was compiled.

    Raises:
      ConfigError: it is not there, or holds no executable.
    """
    return _read(path)[0]


def load(path: str | Path, lowered: Any, devices: Sequence[Any]) -> Any:
    """The `jax.stages.Compiled` of a file whose identity is that of `lowered` on these devices.

    Raises:
      ConfigError: the file has changed, or is damaged.
      JaxRuntimeError: the devices do not take it.
    """
    from jax.experimental import serialize_executable

    _, made = _read(path)
    return serialize_executable.deserialize_and_load(
        made,
        jax.tree.structure(lowered.args_info),
        lowered.out_tree,
        backend=devices[0].client,
        execution_devices=list(devices),
    )


def _read(path: str | Path) -> tuple[Identity, bytes]:
    try:
        whole = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"run.executable: {path}: {error.strerror or error}") from None
    if not whole.startswith(MAGIC):
        raise ConfigError(
            f"run.executable: {path} holds no executable; `jaxspeed plan CONFIG --target TARGET "
            "--compile --keep FILE` writes one"
        )
    head, _, made = whole[len(MAGIC) :].partition(b"\n")
    try:
        told = json.loads(head)
        whole_one = told.pop("sha256") == hashlib.sha256(made).hexdigest()
        told = {**told, "devices": tuple(told["devices"]), "flags": tuple(told["flags"])}
        identity = Identity(**told)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole_one = False
    if not whole_one:
        raise ConfigError(f"run.executable: {path} is damaged: write it again")
    return identity, made


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
    """A digest of what this machine's processor can do, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    told = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    words = " ".join([platform.machine(), *sorted(told.split(":")[-1].split())])
    return f"{platform.machine()} {hashlib.sha256(words.encode()).hexdigest()[:12]}"


def _shown(value: Any) -> str:
    """Short enough for a line."""
    if isinstance(value, dict):
        value = ", ".join(f"{key} {each}" for key, each in value.items())
    elif isinstance(value, tuple):
        value = f"{len(value)}: {', '.join(value[:3])}{', ...' if len(value) > 3 else ''}"
    text = str(value) or "none"
    return text if len(text) <= 120 else f"{text[:12]}..."
