"""Array files by TensorStore: reading, and writing where Orbax cannot: in buckets, from a disk.

The layout is Orbax's: an OCDBT database of Zarr arrays for each process, and one of all of these. A
checkpoint that is copied from a bucket to a disk, or back, is one there too.
"""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxspeed.checkpoint.leaves import SavedLeaf
from jaxspeed.checkpoint.object_storage import key_values_spec, new_context
from jaxspeed.disk.disk_array import BucketArray, DiskArray
from jaxspeed.disk.tier import DiskTier
from jaxspeed.placement.codec import Stored, parts_of

FOLDER = "arrays"
CHUNK_BYTES = 32 << 20  # read at once when resharding, and by an export
_AT_ONCE = 8  # arrays that are read at once
_CONFIG = {"manifest_kind": "single", "max_inline_value_bytes": 1024}
# One process writes a database, in requests of at most so many bytes.
_WRITTEN = {"assume_config": True, "config": _CONFIG, "target_data_file_size": 128 << 20}


def array_spec(folder: epath.Path, name: str, **options: Any) -> dict[str, Any]:
    """TensorStore's description of an array in a database."""
    store = {"driver": "ocdbt", "base": key_values_spec(folder), "path": f"{name}/", **options}
    return {"driver": "zarr", "kvstore": store, "recheck_cached_data": "open"}


def write_arrays(folder: epath.Path, arrays: Mapping[str, jax.Array]) -> list[Any]:
    """Start writing this process's shards, which are in host memory on return; the writes."""
    import tensorstore as ts

    for x in arrays.values():
        x.copy_to_host_async()
    context, writes = new_context(), list[Any]()
    for name, x in arrays.items():
        spec = array_spec(_part(folder, jax.process_index()), name, **_WRITTEN)
        spec |= {"dtype": x.dtype.name, "store_data_equal_to_fill_value": True}
        spec["metadata"] = {"shape": x.shape, "chunks": _chunk(x), "compressor": None}
        writes.append(ts.open(spec, create=True, open=True, context=context))
        array = ts.open(spec, open=True, assume_metadata=True, context=context).result()
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                values, at = np.asarray(shard.data), array[shard.index]
                write = at.write(values, can_reference_source_data_indefinitely=True)
                writes.append(write.commit)
    return writes


def write_from_disk(folder: epath.Path, arrays: Mapping[str, DiskArray], tier: DiskTier) -> None:
    """Write this process's shards of arrays on a disk, bucket by bucket."""
    import tensorstore as ts

    context, opened = new_context(), dict[str, Any]()
    for name, x in arrays.items():
        spec = array_spec(_part(folder, jax.process_index()), name, **_WRITTEN)
        spec |= {"dtype": x.dtype.name, "store_data_equal_to_fill_value": True}
        chunks = _chunk(tier.places[name][0][1])
        spec["metadata"] = {"shape": x.shape, "chunks": chunks, "compressor": None}
        opened[name] = ts.open(spec, create=True, open=True, context=context)
    for bucket, buffer in tier.read_all():
        writes = list[Any]()
        saved = (x for piece in bucket.pieces for x in piece.arrays if x.name in arrays)
        for rows in saved:
            for index, values, shard in rows.regions(buffer):
                if shard.is_first:
                    writes.append(opened[rows.name].result()[index].write(values))
        for write in writes:  # before the buffer holds another bucket
            write.result()


def merge_arrays(folder: epath.Path) -> None:
    """Refer to the arrays of all processes, on one of them after all have finished."""
    import tensorstore as ts

    context, transaction = new_context(), ts.Transaction(atomic=True)

    def database(at: epath.Path, **options: Any) -> Any:
        spec = {"driver": "ocdbt", "base": key_values_spec(at), **options}
        return ts.KvStore.open(spec, context=context).result()

    merged = database(folder / FOLDER, **_WRITTEN)
    for process in range(jax.process_count()):
        part = database(_part(folder, process))
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()
    # What Orbax reads of the arrays beside their database.
    value, tree = {"value_type": "jax.Array", "skip_deserialize": False}, {}
    for name in {key.decode().rpartition("/")[0] for key in merged.list().result()}:
        keys = [{"key": name, "key_type": 2}]
        tree[str((name,))] = {"key_metadata": keys, "value_metadata": value}
    metadata = json.dumps({"tree_metadata": tree, "use_ocdbt": True})
    (folder / FOLDER / "_METADATA").write_text(metadata)


def read_arrays(folder: epath.Path, wanted: Mapping[str, SavedLeaf]) -> dict[str, Stored]:
    """Values by name in the wanted shape (truncated or zero-padded), dtype and sharding.

    Those without elements are left out.
    """
    import tensorstore as ts

    present = {name: leaf for name, leaf in wanted.items() if math.prod(leaf.stored.shape)}
    full, read, context = dict[str, Any](), dict[str, Stored](), new_context()
    for name, leaf in present.items():
        full |= parts_of(name, leaf.arrays)
    for names in itertools.batched(full, _AT_ONCE):
        specs = [array_spec(folder / FOLDER, name) for name in names]
        opened = [ts.open(spec, read=True, context=context) for spec in specs]
        reading = [_reading(array.result(), full[name]) for array, name in zip(opened, names)]
        read |= {name: finish() for finish, name in zip(reading, names)}
    for name, leaf in present.items():
        if leaf.encoded:
            read[name] = {part: read.pop(f"{name}/{part}") for part in leaf.encoded}
    return read


def _reading(array: Any, wanted: jax.ShapeDtypeStruct) -> Callable[[], jax.Array]:
    """Start to read each shard, once for all devices; a function that waits for them."""
    shape, reads = wanted.sharding.shard_shape(wanted.shape), dict[str, Any]()
    for index in wanted.sharding.addressable_devices_indices_map(wanted.shape).values():
        if str(index) not in reads:
            spans = (span.indices(n)[:2] for span, n in zip(index, wanted.shape))
            inside = (slice(min(a, n), min(b, n)) for (a, b), n in zip(spans, array.shape))
            reads[str(index)] = array[tuple(inside)].read()

    def shard(index: Any) -> np.ndarray:
        values = np.asarray(reads[str(index)].result())
        if values.shape != shape:
            values = np.pad(values, [(0, n - m) for n, m in zip(shape, values.shape)])
        return values.astype(wanted.dtype, copy=False)

    return lambda: jax.make_array_from_callback(wanted.shape, wanted.sharding, shard)


def _part(folder: epath.Path, process: int) -> epath.Path:
    return folder / FOLDER / f"ocdbt.process_{process}"


def _chunk(x: jax.Array | BucketArray) -> list[int]:
    """The shape of chunks, which no two shards share, and no two slices of a parameter's rows.

    The last slice of each shard may have fewer rows: then some chunks are written in two parts.
    """
    shape = list(x.sharding.shard_shape(x.shape))
    if isinstance(x, BucketArray) and x.rows:
        shape[x.rows.dim] = x.rows.count
    nbytes = math.prod(shape) * x.dtype.itemsize
    for dim, size in enumerate(shape):
        least = min(size, math.ceil(nbytes / CHUNK_BYTES))
        parts = next(n for n in range(least, size + 1) if size % n == 0)
        shape[dim], nbytes = size // parts, nbytes // parts
    return shape
