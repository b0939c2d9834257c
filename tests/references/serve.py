"""The references' process: calls functions of the modules beside this file for the tests.

A line of stdin names a folder with a request, {"function": "module.name", "arguments": {...}},
whose arrays are torch's tensors here. The answer is written beside it, {"value": ...}, {"missing":
package} or {"error": traceback}, and the line is sent back. The process ends with stdin.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import exchange


def load(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def save(tensors: dict[str, Any], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    # Copies, because safetensors refuses tensors that share memory.
    form = torch.contiguous_format
    save_file({name: x.detach().clone(memory_format=form) for name, x in tensors.items()}, path)


def answer(folder: Path) -> None:
    """Answer the request in a folder. torch is imported by those that use it."""
    try:
        request = exchange.read(folder / "request", load)
        module, _, name = request["function"].rpartition(".")
        value = getattr(importlib.import_module(module), name)(**request["arguments"])
        tensor = sys.modules["torch"].Tensor if "torch" in sys.modules else ()
        exchange.write(folder / "answer", {"value": value}, tensor, save)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name in exchange.PACKAGES
        outcome = {"missing": error.name} if absent else {"error": traceback.format_exc()}
        exchange.write(folder / "answer", outcome, (), save)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        answer(Path(line.rstrip("\n")))
        answers.write(line)


if __name__ == "__main__":
    main()
