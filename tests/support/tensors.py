"""Stand-ins for tensors and loaders of another library, with the interface of torch's alone."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


class Tensor:
    """Has `__array__`, as torch's on a CPU."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)


class DlpackTensor:
    """Has DLPack alone, as torch's of bfloat16 or on a GPU; of a NumPy or JAX array."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __dlpack__(self, **given: Any) -> Any:
        return self.value.__dlpack__(**given)

    def __dlpack_device__(self) -> Any:
        return self.value.__dlpack_device__()


class Loader:
    """Batches of the arrays' rows, anew with each iteration, as torch's DataLoader gives them."""

    def __init__(
        self, arrays: Mapping[str, np.ndarray], batch_size: int, tensor: Callable[[Any], Any]
    ) -> None:
        self.arrays, self.batch_size, self.tensor = dict(arrays), batch_size, tensor

    def __len__(self) -> int:
        return -(-len(next(iter(self.arrays.values()))) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(len(self)):
            rows = slice(i * self.batch_size, (i + 1) * self.batch_size)
            yield {name: self.tensor(x[rows]) for name, x in self.arrays.items()}
