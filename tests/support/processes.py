"""Several processes of one run on this machine, each with its share of the simulated devices."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspeed.launch.variables import COORDINATOR, COUNT, RANK

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Group:
    """Started processes; their output is in one file each."""

    runs: list[subprocess.Popen[Any]]
    outputs: list[Path]
    began: float = field(default_factory=time.monotonic)

    def codes(self, timeout: float = 240) -> list[int]:
        """The exit codes of all, when the last has ended."""
        deadline = time.monotonic() + timeout
        try:
            return [run.wait(max(deadline - time.monotonic(), 0.01)) for run in self.runs]
        except subprocess.TimeoutExpired:
            shown = "\n".join(f"--- {i}\n{self.said(i)[-3000:]}" for i in range(len(self.runs)))
            raise AssertionError(f"not ended: {[r.poll() for r in self.runs]}\n{shown}") from None
        finally:
            self.end()

    def said(self, rank: int) -> str:
        return self.outputs[rank].read_text(errors="replace")

    def end(self) -> None:
        for run in self.runs:
            run.kill()
            run.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def start(
    folder: Path,
    count: int,
    module: str,
    *words: str | Path,
    faults: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    **environment: str,
) -> Group:
    """`python -m module WORDS` in `count` processes; `faults` by rank, for tests.run.process."""
    address = f"localhost:{free_port()}"
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    folder.mkdir(parents=True, exist_ok=True)
    runs, outputs = [], []
    for rank in range(count) if ranks is None else ranks:
        outputs.append(folder / f"output-{len(list(folder.glob('output-*')))}-{rank}.txt")
        own = {
            **kept,
            "XLA_FLAGS": " ".join(flags),
            "NO_COLOR": "1",
            "COLUMNS": "80",
            COORDINATOR: address,
            COUNT: str(count),
            RANK: str(rank),
            "TEST_FAULT": faults[rank] if faults else "",
            **environment,
        }
        with outputs[-1].open("wb") as output:
            runs.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, words)],
                    cwd=ROOT,
                    env=own,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return Group(runs, outputs)
