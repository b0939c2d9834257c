"""Files as torch, DeepSpeed and torch's DCP write them, byte by byte and without torch."""

import io
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

STORAGES = {"float32": "Float", "bfloat16": "BFloat16", "float16": "Half", "int64": "Long"}
METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Global:
    """A class or a function, by its name."""

    module: str
    name: str


@dataclass
class Call:
    """What a class or a function constructs, with the state that is then set."""

    what: Global
    arguments: tuple = ()
    state: Any = None
    opcode: bytes = b"R"


@dataclass
class Bytes:
    """Instructions, as they are."""

    code: bytes


@dataclass
class Tensor:
    """A tensor, by default of an array that is all of its storage."""

    array: np.ndarray
    shape: Any = None
    strides: Any = None
    offset: Any = 0
    size: Any = None
    key: str = ""


@dataclass
class Reference:
    """What is stored beside a pickle."""

    value: tuple


@dataclass
class Archive:
    """The members of an archive of torch's."""

    storages: dict[str, bytes] = field(default_factory=dict)

    def code(self, x: Any) -> bytes:
        """The instructions of a pickle that make a value."""
        match x:
            case Bytes():
                return x.code
            case None:
                return b"N"
            case bool():
                return b"\x88" if x else b"\x89"
            case int() if -(1 << 31) <= x < 1 << 31:
                return b"J" + struct.pack("<i", x)
            case int():
                number = x.to_bytes((x.bit_length() + 8) // 8, "little", signed=True)
                return b"\x8a" + bytes([len(number)]) + number
            case float():
                return b"G" + struct.pack(">d", x)
            case str():
                text = x.encode()
                return b"X" + struct.pack("<I", len(text)) + text
            case Global():
                return f"c{x.module}\n{x.name}\n".encode()
            case tuple():
                return b"(" + b"".join(map(self.code, x)) + b"t"
            case list():
                return b"](" + b"".join(map(self.code, x)) + b"e"
            case dict():
                pairs = (self.code(y) for pair in x.items() for y in pair)
                return b"}(" + b"".join(pairs) + b"u"
            case Call():
                state = b"" if x.state is None else self.code(x.state) + b"b"
                return self.code(x.what) + self.code(x.arguments) + x.opcode + state
            case Reference():
                return self.code(x.value) + b"Q"
            case Tensor():
                return self._tensor(x)
        raise TypeError(x)

    def _tensor(self, x: Tensor) -> bytes:
        array = np.ascontiguousarray(x.array)
        key = x.key or str(len(self.storages))
        self.storages.setdefault(key, array.tobytes())
        shape = x.array.shape if x.shape is None else x.shape
        strides = tuple(s // array.itemsize for s in np.empty(x.array.shape, array.dtype).strides)
        storage = Global("torch", f"{STORAGES[array.dtype.name]}Storage")
        size = array.size if x.size is None else x.size
        arguments = (
            Reference(("storage", storage, key, "cpu", size)), x.offset, shape,
            strides if x.strides is None else x.strides, False,
            Call(Global("collections", "OrderedDict")),
        )  # fmt: skip
        return self.code(Call(Global("torch._utils", "_rebuild_tensor_v2"), arguments))


def text(value: Any) -> bytes:
    """The instructions of a value without tensors."""
    return Archive().code(value)


def pickled(value: Any, archive: Archive | None = None) -> bytes:
    return b"\x80\x02" + (archive or Archive()).code(value) + b"."


def saved(value: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    archive, file = Archive(), io.BytesIO()
    data = pickled(value, archive)
    members = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
    members |= {f"data/{key}": x for key, x in archive.storages.items()}
    with zipfile.ZipFile(file, "w", options.get("compression", zipfile.ZIP_STORED)) as out:
        for name, content in members.items():
            out.writestr(f"{options.get('folder', 'archive')}/{name}", content)
    return file.getvalue()


def size(*sizes: int) -> Call:
    return Call(Global("torch", "Size"), (tuple(sizes),))


def fragment(numel: int, start: int) -> Call:
    of = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return Call(of, (), {"numel": numel, "start": start}, b"\x81")


def stage(number: int) -> Call:
    return Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (number,))


def scaler(**fields: Any) -> Call:
    name = "DynamicLossScaler" if fields.get("dynamic") else "LossScaler"
    return Call(Global("deepspeed.runtime.fp16.loss_scaler", name), (), fields, b"\x81")


STATIC = scaler(cur_scale=1.0, dynamic=False)


def flat(values: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([x.ravel() for x in values.values()])


def counts(**changes: Any) -> dict[str, Any]:
    return {
        "global_steps": 7, "skipped_steps": 2, "global_samples": 56, "dp_world_size": 2,
        "lr_scheduler": {"last_batch_iteration": 4}, "ds_version": "0.19.6", **changes,
    }  # fmt: skip


def deepspeed(
    folder: Path,
    number: int,
    values: dict[str, dict[str, np.ndarray]],
    ranks: int = 2,
    loss_scaler: Call = STATIC,
    frozen: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> Path:
    """A checkpoint of a ZeRO stage; `values` are by "", "exp_avg" and "exp_avg_sq", and by name."""
    there = folder / "saved"
    there.mkdir(parents=True)
    (folder / "latest").write_text("saved")
    shapes = {name: size(*x.shape) for name, x in values[""].items()}
    model = counts(param_shapes=[shapes], shared_params={}, **changes)
    if number < 3:
        length = -(-flat(values[""]).size // ranks)
        module = {n: Tensor(x) for n, x in values[""].items()}
        (there / "mp_rank_00_model_states.pt").write_bytes(saved(model | {"module": module}))
    for rank in range(ranks):
        if number == 3:
            frozen = frozen or {}
            names = [*values[""], *frozen]
            module = dict.fromkeys(names, Tensor(np.zeros(0, np.float32), key="none"))
            fragments = {n: Tensor(_stage_3({n: x}, rank, ranks)) for n, x in frozen.items()}
            model["frozen_param_shapes"] = {n: size(*x.shape) for n, x in frozen.items()}
            model["frozen_param_fragments"] = fragments
            path = there / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            path.write_bytes(saved(model | {"module": module, "buffer_names": []}))
            parts = {k: _stage_3(x, rank, ranks) for k, x in values.items()}
        else:
            parts = {k: flat(x)[rank * length :][:length] for k, x in values.items()}
        moments = {k: Tensor(x) for k, x in parts.items() if k}
        base = {"state": {0: {"step": 5, **moments}}, "param_groups": [{"lr": 0.1}]}
        masters = [Tensor(parts[""])]
        state: dict[str, Any] = {"loss_scaler": loss_scaler, "zero_stage": stage(number)}
        if number == 3:
            state |= {"partition_count": ranks, "fp32_flat_groups": masters}
            state |= {"optimizer_state_dict": base}
        else:
            state |= {"partition_count": [ranks], "single_partition_of_fp32_groups": masters}
            state |= {"base_optimizer_state": base, "group_paddings": [0]}
            state |= {"param_slice_mappings": [_slices(values[""], rank, length)]}
        path = there / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        path.write_bytes(saved({"optimizer_state_dict": state, "ds_version": "0.19.6"}))
    return folder


def _stage_3(values: dict[str, np.ndarray], rank: int, ranks: int) -> np.ndarray:
    parts = []
    for _, x in values.items():
        each = -(-x.size // ranks)
        part = x.ravel()[rank * each :][:each]
        parts.append(np.pad(part, (0, each - part.size)))
    return np.concatenate(parts)


def _slices(values: dict[str, np.ndarray], rank: int, length: int) -> dict[str, Call]:
    slices, at = {}, -rank * length
    for name, x in values.items():
        begin, end = max(0, at), min(length, at + x.size)
        if begin < end:
            slices[name] = fragment(end - begin, begin)
        at += x.size
    return slices


def universal(folder: Path, values: dict[str, dict[str, np.ndarray]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").write_bytes(saved(counts(module={})))
    for key, of_key in values.items():
        for name, x in of_key.items():
            there = folder / "zero" / name
            there.mkdir(parents=True, exist_ok=True)
            (there / f"{key or 'fp32'}.pt").write_bytes(saved({"param": Tensor(x)}))
            (there / "step.pt").write_bytes(saved(Tensor(np.float32(5))))
    return folder


def _metadata(name: str, **fields: Any) -> Call:
    return Call(Global(METADATA, name), (), fields, b"\x81")


def dcp(folder: Path, values: dict[str, dict[str, np.ndarray]], ranks: int = 2) -> Path:
    """A checkpoint of torch's DCP, sharded along the first dim."""
    folder.mkdir(parents=True)
    entries: dict[str, Call] = {}
    where: list[tuple[Call, Call]] = []
    files = [io.BytesIO() for _ in range(ranks)]

    def put(rank: int, key: str, offsets: tuple[int, ...], content: bytes) -> None:
        file = files[rank]
        index = _metadata("MetadataIndex", fqn=key, offset=size(*offsets), index=0)
        place = {"relative_path": f"__{rank}_0.distcp", "offset": file.tell()}
        info = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        where.append((index, Call(info, (), place | {"length": len(content)}, b"\x81")))
        file.write(content)

    def add(key: str, x: np.ndarray) -> None:
        chunks = []
        of_rank = np.array_split(x, ranks) if x.ndim else [x]
        start = 0
        for rank, part in enumerate(of_rank):
            if part.size:
                offsets = (start, *(0,) * (x.ndim - 1)) if x.ndim else ()
                chunk = {"offsets": size(*offsets), "sizes": size(*part.shape)}
                chunks.append(_metadata("ChunkStorageMetadata", **chunk))
                put(rank, key, offsets, saved(Tensor(part)))
                start += len(part) if x.ndim else 0
        properties = Call(
            Global(METADATA, "TensorProperties"), (),
            (Global("torch", x.dtype.name), None, False, None, False), b"\x81",
        )  # fmt: skip
        fields = {"properties": properties, "size": size(*x.shape), "chunks": chunks}
        entries[key] = _metadata("TensorStorageMetadata", **fields)

    for key, of_key in values.items():
        for name, x in of_key.items():
            add(f"optim.state.{name}.{key}" if key else f"model.{name}", x)
    for name in values[""]:
        add(f"optim.state.{name}.step", np.float32(5) + np.zeros((), np.float32))
    entries["lr_scheduler.last_epoch"] = _metadata("BytesStorageMetadata")
    put(0, "lr_scheduler.last_epoch", (), saved(6))
    pairs = b"".join(Archive().code(x) for pair in where for x in pair)
    metadata = _metadata(
        "Metadata", state_dict_metadata=entries, storage_data=Bytes(b"}(" + pairs + b"u")
    )
    (folder / ".metadata").write_bytes(pickled(metadata))
    for rank, file in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    return folder
