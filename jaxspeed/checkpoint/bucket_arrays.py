"""Array files of a checkpoint in a bucket, which TensorStore writes: Orbax has no paths there.

The layout is Orbax's: Zarr arrays in an OCDBT database for each process, and one that refers to all
of these. So a checkpoint that is copied from a bucket to a disk, or back, is one there too.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxspeed.checkpoint.buckets import key_values_spec, new_context
from jaxspeed.placement.codec import Stored

CHUNK_BYTES = 32 << 20  # read at once when resharding, and by an export
_FILE_BYTES = 128 << 20  # in one request
_AT_ONCE = 32  # arrays
# Only one process writes to a database, and the small metadata of an array are within its index.
_WRITTEN = {
    "assume_config": True,
    "config": {"manifest_kind": "single", "max_inline_value_bytes": 1024},
    "target_data_file_size": _FILE_BYTES,
}


def array_spec(folder: epath.Path, name: str, **options: Any) -> dict[str, Any]:
    """TensorStore's description of an array in the folder of a checkpoint's arrays."""
    base = key_values_spec(folder)
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/", **options}
    return {"driver": "zarr", "kvstore": store, "recheck_cached_metadata": False}


def write_arrays(folder: epath.Path, arrays: Mapping[str, jax.Array]) -> list[Any]:
    """Start writing this process's shards, which are in host memory on return; the writes."""
    import tensorstore as ts

    for x in arrays.values():
        x.copy_to_host_async()
    writes: list[Any] = []
    context = new_context()
    for name, x in arrays.items():
        spec = array_spec(_of_process(folder, jax.process_index()), name, **_WRITTEN) | {
            "dtype": x.dtype.name,
            "metadata": {"shape": x.shape, "chunks": _chunk(x), "compressor": None},
            "store_data_equal_to_fill_value": True,  # what is missing was not written
        }
        writes.append(ts.open(spec, create=True, open=True, context=context))
        array = ts.open(spec, open=True, assume_metadata=True, context=context).result()
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                values, at = np.asarray(shard.data), array[shard.index]
                written = at.write(values, can_reference_source_data_indefinitely=True)
                writes.append(written.commit)
    return writes


def merge_arrays(folder: epath.Path) -> None:
    """Refer to the arrays of all processes, on one of them after all have finished."""
    import tensorstore as ts

    context = new_context()

    def opened(at: epath.Path, **options: Any) -> Any:
        spec = {"driver": "ocdbt", "base": key_values_spec(at), **options}
        return ts.KvStore.open(spec, context=context).result()

    merged, transaction = opened(folder, **_WRITTEN), ts.Transaction(atomic=True)
    for process in range(jax.process_count()):
        part = opened(_of_process(folder, process))
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()
    names = [key.decode() for key in merged.list().result() if key.endswith(b"/.zarray")]
    (folder / "_METADATA").write_text(_orbax_metadata(name.rpartition("/")[0] for name in names))


def read_sharded(
    folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Stored]:
    """The arrays in the wanted shape (truncated or zero-padded), dtype and sharding."""
    import tensorstore as ts

    read: dict[str, Stored] = {}
    context = new_context()
    for names in itertools.batched(wanted, _AT_ONCE):
        opening = {name: array_spec(folder, name) for name in names}
        arrays = {n: ts.open(spec, read=True, context=context) for n, spec in opening.items()}
        shards = {name: _shards(arrays[name].result(), wanted[name]) for name in names}
        for name in names:
            read[name] = _assembled(wanted[name], shards.pop(name))
    return read


def _shards(array: Any, wanted: jax.ShapeDtypeStruct) -> dict[str, tuple[Any, Any]]:
    """By its index the part of each shard that is there, which is being read once for all."""
    shards: dict[str, tuple[Any, Any]] = {}
    for index in wanted.sharding.addressable_devices_indices_map(wanted.shape).values():
        if str(index) not in shards:
            spans = (span.indices(n)[:2] for span, n in zip(index, wanted.shape))
            inside = [(min(a, n), min(b, n)) for (a, b), n in zip(spans, array.shape)]
            part = tuple(slice(b - a) for a, b in inside)
            there = array[tuple(itertools.starmap(slice, inside))].read()
            shards[str(index)] = part, there
    return shards


def _assembled(wanted: jax.ShapeDtypeStruct, shards: Mapping[str, tuple[Any, Any]]) -> jax.Array:
    shape = wanted.sharding.shard_shape(wanted.shape)

    def shard(index: Any) -> np.ndarray:
        part, there = shards[str(index)]
        values = there.result()
        if values.shape == shape and values.dtype == wanted.dtype:
            return np.asarray(values)
        padded = np.zeros(shape, wanted.dtype)
        padded[part] = values
        return padded

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, shard)


def _of_process(folder: epath.Path, process: int) -> epath.Path:
    return folder / f"ocdbt.process_{process}"


def _chunk(x: jax.Array) -> list[int]:
    """The shape of chunks, of which no two shards share one."""
    shape = list(x.sharding.shard_shape(x.shape))
    nbytes = math.prod(shape) * x.dtype.itemsize
    for dim, size in enumerate(shape):
        divisors = (n for n in range(1, size + 1) if size % n == 0)
        parts = next(n for n in divisors if nbytes // n <= CHUNK_BYTES or n == size)
        shape[dim], nbytes = size // parts, nbytes // parts
    return shape


def _orbax_metadata(names: Iterable[str]) -> str:
    """What Orbax reads of arrays beside their database."""
    value = {"value_type": "jax.Array", "skip_deserialize": False}
    tree = {
        str((name,)): {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value}
        for name in names
    }
    form = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return json.dumps({"tree_metadata": tree, **form, "custom_metadata": None})
