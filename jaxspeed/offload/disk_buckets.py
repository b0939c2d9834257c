"""The buckets of state on a disk: slices of parameters that are read and written together."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxspeed.disk.direct_file import aligned
from jaxspeed.disk.disk_array import BucketArray, BucketPiece, DiskBucket, ShardRows
from jaxspeed.offload.offloaded_update import EMA, OPT, UPDATED, StreamedUpdate
from jaxspeed.placement.codec import parts_of
from jaxspeed.placement.rows import Row


def disk_buckets(update: StreamedUpdate) -> tuple[DiskBucket, ...]:
    """Buckets of at most `update.bucket` elements of each kind of array per device.

    A parameter that the optimizer updates only as one is not divided, whatever its size. Those that
    are not on the disk are updated with the others.
    """
    assert update.bucket is not None
    groups: list[list[_Sized]] = []
    elements = 0
    for row in update.trained:
        for sized in _pieces(update, row):
            if not groups or elements + sized.elements > update.bucket:
                groups.append([])
                elements = 0
            groups[-1].append(sized)
            elements += sized.elements
    buckets, offset = list[DiskBucket](), 0
    for group in groups:
        buckets.append(_bucket(offset, [sized.piece for sized in group]))
        offset += buckets[-1].nbytes
    return tuple(buckets)


class _Sized(NamedTuple):
    piece: BucketPiece
    elements: int  # per device


def _pieces(update: StreamedUpdate, row: Row) -> Iterator[_Sized]:
    """The slices of a parameter, with offsets that begin at 0."""
    layouts, names = update.layouts(row), _on_disk(update, row)
    plan = update.plan(row, layouts)
    per_device = update.elements(row)
    if plan is None:
        spans: list[ShardRows | None] = [None]
    else:
        spans = [
            ShardRows(plan.dim, plan.size, start, min(plan.rows, plan.size - start))
            for start in range(0, plan.size, plan.rows)
        ]
    for span in spans:
        arrays = []
        for role, (name, dtype) in names.items():
            shape, at = layouts[role].shape, layouts[role].at
            if plan and span:
                shape = plan.slice_shape(shape, span.count)
            arrays.append(BucketArray(name, shape, dtype, at, span, 0))
        elements = per_device if span is None else per_device // span.size * span.count
        yield _Sized(BucketPiece(row.path, span, tuple(arrays), tuple(names)), elements)


def _on_disk(update: StreamedUpdate, row: Row) -> dict[str, tuple[str, object]]:
    """{what an array is to the update: (its name in a checkpoint, dtype)} of those on the disk."""
    names: dict[str, tuple[str, object]] = {}
    if row.master and row.master.disk:
        names[UPDATED] = f"params/{row.path}", row.master.dtype
    if row.opt and row.opt.disk:
        if update.ema_decay is not None:
            names[EMA] = f"ema/{row.path}", row.updated.dtype
        for path in update.states[row.path]:
            if update.layout.places[path].placement.disk:
                arrays = update.layout.values[path].arrays
                saved = parts_of(f"opt/{path}", arrays)
                for role, (name, x) in zip(parts_of(OPT + path, arrays), saved.items()):
                    names[role] = name, x.dtype
    return names


def _bucket(offset: int, pieces: list[BucketPiece]) -> DiskBucket:
    placed, nbytes = list[BucketPiece](), 0
    for piece in pieces:
        arrays = []
        for x in piece.arrays:
            arrays.append(replace(x, offset=nbytes))
            nbytes += x.nbytes
        placed.append(replace(piece, arrays=tuple(arrays)))
    assert nbytes == aligned(nbytes)
    return DiskBucket(offset, nbytes, tuple(placed))
