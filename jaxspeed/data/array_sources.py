"""Array sources: images with labels from .npz/.npy files, and iterables of mappings."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspeed.data.files import find_files, read_array
from jaxspeed.data.model_limits import ModelLimits
from jaxspeed.data.sources import SUFFIXES
from jaxspeed.errors import DataError

Arrays = dict[str, np.ndarray]
# The digest of a larger array uses only ROWS evenly spaced rows.
FULLY_HASHED = 64 << 20
ROWS = 1024


def read_images(paths: Sequence[str], limits: ModelLimits) -> Arrays:
    """Read `images` [n, height, width, channels] and `labels` [n].

    From .npz files that hold both, or from folders with images.npy and labels.npy.
    """
    parts = [_images_in(Path(name).expanduser()) for name in paths]
    if len(parts) == 1:
        images, labels = parts[0]
    else:
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
    shown = ", ".join(paths)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"data: {shown}: images {list(images.shape)} and labels {list(labels.shape)} must be "
            "[n, height, width, channels] and [n]"
        )
    if labels.dtype.kind not in "iu":
        raise DataError(f"data: {shown}: labels are {labels.dtype}; they must be integers")
    if limits.image_shape and images.shape[1:] != limits.image_shape:
        raise DataError(
            f"data: {shown}: images are {list(images.shape[1:])}, but the model reads "
            f"{list(limits.image_shape)}"
        )
    if limits.classes and len(labels) and not 0 <= labels.min() <= labels.max() < limits.classes:
        raise DataError(
            f"data: {shown}: labels range from {labels.min()} to {labels.max()}, but the model has "
            f"{limits.classes} classes"
        )
    return {"images": images, "labels": labels}


def _images_in(path: Path) -> tuple[np.ndarray, np.ndarray]:
    if path.is_dir() and (path / "images.npy").exists():
        names = [path / "images.npy", path / "labels.npy"]
        images, labels = (read_array(name) for name in names)
        return images, labels
    files = [_load_npz(file) for file in find_files([str(path)], SUFFIXES["images"])]
    return tuple(np.concatenate(arrays) for arrays in zip(*files))  # type: ignore[return-value]


def _load_npz(file: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(file) as arrays:
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("not an .npz file")
            missing = {"images", "labels"} - set(arrays.files)
            if missing:
                raise ValueError(f"it holds {', '.join(arrays.files)}, not images and labels")
            return arrays["images"], arrays["labels"]
    except Exception as error:  # zip and NumPy raise many kinds
        raise DataError(f"data: {str(file)!r} cannot be read: {error}") from None


def stack(records: Sequence[Mapping[str, Any]], name: str) -> Arrays:
    """Stack samples, mappings from names to arrays of equal shapes, into one array per name."""
    first = {key: np.shape(value) for key, value in records[0].items()}
    for i, record in enumerate(records):
        shapes = {key: np.shape(value) for key, value in record.items()}
        if shapes != first:
            raise DataError(f"data: {name}: sample {i} has {shapes}, but the first has {first}")
    arrays = {key: np.stack([record[key] for record in records]) for key in first}
    for key, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise DataError(f"data: {name}: {key!r} is {array.dtype}; samples must be numeric")
    return arrays


def joined(batches: Sequence[Mapping[str, np.ndarray]], name: str) -> Arrays:
    """Concatenate batches of samples, whose arrays differ at most in their number of samples."""
    for i, batch in enumerate(batches):
        if len({len(x) if x.ndim else -1 for x in batch.values()}) != 1 or not batch:
            shapes = {key: x.shape for key, x in batch.items()}
            raise DataError(f"data: {name}: batch {i} has {shapes}: its samples do not go together")
    return stack([dict(zip(batch, row)) for batch in batches for row in zip(*batch.values())], name)


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
        every = 1 if array.nbytes <= FULLY_HASHED else max(1, len(array) // ROWS)
        hasher.update(np.ascontiguousarray(array[::every]).data)
    return hasher.hexdigest()
