"""What is imported; and for the tests of the protocol: what is received, sent, raised."""

import importlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch import Tensor


def imported(package: str) -> None:
    importlib.import_module(package)


def imported_where_it_is_absent(package: str) -> None:
    with mock.patch.dict(sys.modules, {package: None}):
        importlib.import_module(package)


def received(value: Any) -> Any:
    """`value`, as it came."""
    print("a line that is no answer")
    return value


def described(tensors: "dict[str, Tensor]") -> dict[str, tuple[str, list[int], float]]:
    """(dtype, shape, sum) of each tensor, as torch has it."""
    return {
        name: (str(x.dtype), list(x.shape), sum(complex(each).real for each in x.flatten()))
        for name, x in tensors.items()
    }


def sharing() -> "list[Tensor]":
    """A parameter, its transpose, and a column of it."""
    import torch

    x = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    return [x, x.T, x[:, 1]]


def failing() -> None:
    raise ValueError("a reference that fails")


def killed() -> None:
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def slow() -> None:
    time.sleep(600)


def process() -> int:
    return os.getpid()
