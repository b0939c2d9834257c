"""Records that hold token ids in a field: `tokens`, or `input_ids` as Hugging Face names them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxspeed.errors import BatchError, DataError
from jaxspeed.user_models.batch_checks import array_of, is_tensor

FIELDS = ("tokens", "input_ids")
MASK, LABELS = "attention_mask", "labels"


def token_field(names: Iterable[Any]) -> str | None:
    """The field with ids among these, if there is one."""
    return next((field for field in FIELDS if field in names), None)


def numpy_of(value: Any, where: str) -> np.ndarray:
    """An array, a tensor or lists of numbers as a NumPy array."""
    try:
        return np.asarray(array_of(value, where) if is_tensor(value) else value)
    except BatchError as error:
        raise DataError(f"data: {error}") from None
    except ValueError as error:  # lists of different lengths
        raise DataError(f"data: {where}: {error}") from None


def documents_in(record: Mapping[str, Any], field: str, where: str) -> Iterator[np.ndarray]:
    """The documents of a record: its ids [tokens], or a batch of them [documents, tokens].

    Padding, of which the `attention_mask` is 0, is left out.

    Raises:
      DataError: `labels` are others than the ids, since packed documents are predicted entirely.
    """
    if field not in record:
        raise DataError(f"data: {where}: no field {field!r}; its fields: {', '.join(record)}")
    ids = numpy_of(record[field], f"{where}, {field!r}")
    beside = {
        name: numpy_of(record[name], f"{where}, {name!r}")
        for name in (MASK, LABELS)
        if record.get(name) is not None
    }
    if ids.size and (ids.dtype.kind not in "iu" or ids.ndim not in (1, 2)):
        raise DataError(
            f"data: {where}: {field!r} holds {ids.dtype}{list(ids.shape)}; ids must be integers, "
            "[tokens] or [documents, tokens]"
        )
    if ids.size and ids.min() < 0:
        raise DataError(f"data: {where}: {field!r} holds negative ids")
    for name, x in beside.items():
        if x.shape != ids.shape:
            raise DataError(
                f"data: {where}: {name!r} has {list(x.shape)}, but {field!r} {list(ids.shape)}"
            )
    known = beside[MASK] != 0 if MASK in beside else np.ones(ids.shape, bool)
    if LABELS in beside and (beside[LABELS] != ids)[known].any():
        raise DataError(
            f"data: {where}: 'labels' differ from {field!r}, but every token of a packed document "
            "is predicted; pass such batches to engine.train_batch, with a loss that reads them, "
            "or leave the labels out"
        )
    for row, shown in zip(np.atleast_2d(ids), np.atleast_2d(known)):
        yield row[shown]
