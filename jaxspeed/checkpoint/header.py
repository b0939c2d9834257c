"""A checkpoint's header, `checkpoint.json`: leaves, mesh, versions and client state."""

import importlib.metadata
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
from etils import epath
from pydantic import TypeAdapter

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.adapters.adapter import Adapter
from jaxspeed.checkpoint.leaves import SavedLeaf
from jaxspeed.checkpoint.manifest import FORMAT
from jaxspeed.errors import CheckpointError
from jaxspeed.placement.codec import PLAIN, Codec
from jaxspeed.quantization.codecs import CODECS, codec_named
from jaxspeed.train.program import Program
from jaxspeed.user_models.pretrained_model import Origin

NAME = "checkpoint.json"
FILES = "files"


@dataclass(frozen=True)
class LeafRecord:
    """One value on disk.

    Attributes:
      stored: the shape with padding, as it was stored.
      arrays: of a codec other than "plain", (shape, dtype) by name.
    """

    shape: tuple[int, ...]  # without padding
    stored: tuple[int, ...]
    dtype: str
    key: str | None = None
    codec: str = PLAIN.name
    arrays: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        arrays = self.arrays.values() if self.arrays else [(self.shape, self.dtype)]
        return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in arrays)


@dataclass(frozen=True)
class AdapterRecord:
    """The adapters of a model.

    Attributes:
      section: `lora` of the config.
      adapters: by the paths of their weights.
      trained: the paths of the parameters that are trained beside them.
    """

    section: dict[str, Any]
    adapters: dict[str, Adapter]
    trained: list[str]

    @classmethod
    def of(cls, program: Program) -> Self | None:
        """The record of the adapters of a program's model, if it has some."""
        model = program.model
        if not isinstance(model, AdaptedModel):
            return None
        trained = [leaf.path for leaf in model.leaves if leaf.trainable and not leaf.adapts]
        return cls(model.section.model_dump(mode="json"), dict(model.adapters), trained)


@dataclass(frozen=True)
class Header:
    """The metadata of a checkpoint."""

    tag: str
    step: int
    time: float  # seconds since 1970
    leaves: dict[str, LeafRecord]
    mesh: dict[str, int]
    device: str
    processes: int
    stage: int
    loss_scale_rule: str
    versions: dict[str, str]
    client_state: dict[str, Any]
    files: list[str]
    adapters: AdapterRecord | None = None
    base: Origin | None = None  # of the parameters that are `excluded`
    excluded: dict[str, LeafRecord] = field(default_factory=dict)  # frozen, and not saved
    adapter: str = "default"  # the name of the one in use; others are below `adapters/NAME`


def header_of(
    program: Program,
    tag: str,
    step: int,
    client_state: Mapping[str, Any],
    files: list[str],
    saved: Mapping[str, SavedLeaf],
    excluded: Mapping[str, SavedLeaf],
    adapter: str,
) -> Header:
    def record(leaf: SavedLeaf) -> LeafRecord:
        return LeafRecord(
            leaf.shape,
            tuple(leaf.stored.shape),
            leaf.stored.dtype.name,
            leaf.key,
            leaf.codec.name,
            {part: (tuple(x.shape), x.dtype.name) for part, x in leaf.encoded.items()},
        )

    weights = program.model.weights
    return Header(
        tag=tag,
        step=step,
        time=time.time(),
        leaves={name: record(leaf) for name, leaf in saved.items()},
        mesh=dict(program.mesh.shape),
        device=program.mesh.devices.flat[0].device_kind,
        processes=jax.process_count(),
        stage=program.table.stage,
        loss_scale_rule=repr(program.optimizer.rule),
        versions={
            name: importlib.metadata.version(name) for name in ("jax", "flax", "orbax-checkpoint")
        },
        client_state=dict(client_state),
        files=files,
        adapters=AdapterRecord.of(program),
        base=weights.origin if weights and excluded else None,
        excluded={name: record(leaf) for name, leaf in excluded.items()},
        adapter=adapter,
    )


def as_json(header: Header) -> bytes:
    return json.dumps(asdict(header), indent=1).encode()


def read_header(folder: epath.Path, form: Any) -> Header:
    """The header of a checkpoint whose manifest says that it is of this format.

    Raises:
      CheckpointError: written in another format than this version reads, or damaged.
    """
    if form != FORMAT:
        raise CheckpointError(
            f"{folder}: written in format {form!r}; this version of jaxspeed reads "
            f"format {FORMAT}. Use the version that wrote it"
        )
    try:
        header = TypeAdapter(Header).validate_python(json.loads((folder / NAME).read_text()))
        for leaf in header.leaves.values():
            jnp.dtype(leaf.dtype)
        if any(name in ("", ".", "..") or "/" in name for name in header.files):
            raise ValueError("a path out of the folder")
    except (ValueError, TypeError, OSError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        what = f"{folder}: {NAME} is {'missing' if missing else 'damaged'}"
        raise CheckpointError(what) from error
    return header


def codec_of(name: str, record: LeafRecord) -> Codec:
    """The codec that stored a value.

    Raises:
      CheckpointError: this version does not have it.
    """
    codec = codec_named(record.codec)
    if codec is None:
        raise CheckpointError(
            f"{name} was stored by the codec {record.codec!r}; this version has "
            + ", ".join(CODECS)
        )
    return codec


def check_client_state(value: Any, path: str = "client_state") -> None:
    """Raise CheckpointError unless a JSON round trip returns an equal value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, list):
        for i, item in enumerate(value):
            check_client_state(item, f"{path}[{i}]")
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has the key {key!r}; use a string: {str(key)!r}")
            check_client_state(item, f"{path}[{key!r}]")
        return
    instead = {"tuple": "a list", "ndarray": ".tolist()", "Array": ".tolist()"}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}; it is stored as JSON: numbers, strings, lists and "
        f"dicts (use {instead.get(type(value).__name__, 'one of these')})"
    )
