"""What a launcher shows: rank 0's output as it is, and of the others what matters, once.

Each rank's complete output goes to its file if there is a folder for logs.
"""

import re
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from jaxspeed.launch.local_group import Output

LAST_LINES = 20
# Rank 0 often has the same to say a moment later; then the other's line is left out.
_SECONDS_HELD = 1.0
_SEEN = 2000

_MATTERS = re.compile(
    r"\b(warning|error|exception|traceback|fatal|critical|failed|refused|out of memory)\b", re.I
)
_GLOG = re.compile(r"[EF]\d{4} ")  # XLA's errors
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
_NUMBERS = re.compile(r"\d+")


class Display:
    """The output of a run's processes.

    Args:
      logs: the folder of the files `rank-N.log`, which are appended to; None: no files.
      all_ranks: show each line of each rank, with its rank.
    """

    def __init__(
        self,
        logs: Path | None = None,
        all_ranks: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs, self._all, self._clock = logs, all_ranks, clock
        self._files: dict[int, IO[str]] = {}
        self._last: dict[int, deque[str]] = {}
        self._partial: dict[int, str] = {}
        self._seen: deque[str] = deque(maxlen=_SEEN)
        self._held: deque[tuple[float, Output]] = deque()
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)

    def show(self, output: Output) -> None:
        """Show and write what a process has printed."""
        if output.raw:
            sys.stdout.buffer.write(output.raw)
            sys.stdout.buffer.flush()
            text = self._partial.pop(output.rank, "") + output.text
            *lines, rest = re.split(r"\r?\n|\r", text)
            self._partial[output.rank] = rest
            for line in lines:
                self._remember(output.rank, line)
            return
        self._remember(output.rank, output.text)
        if output.rank == 0 and not self._all:
            _print(output.text, output.error)
            self._seen.append(_same(output.text))
        elif self._all:
            _print(f"[{output.rank}] {output.text}", output.error)
        elif _matters(output):
            self._held.append((self._clock() + _SECONDS_HELD, output))

    def pass_time(self) -> None:
        """Show what was held back long enough, unless another rank has shown the same."""
        while self._held and self._held[0][0] <= self._clock():
            self._show_held()

    def flush(self) -> None:
        while self._held:
            self._show_held()

    def say(self, text: str) -> None:
        """Print a line of the launcher's own, after what came before it."""
        self.flush()
        if self._partial.pop(0, ""):  # a progress display, which may have hidden the cursor
            print("\x1b[?25h", flush=True)
        print(text, file=sys.stderr, flush=True)

    def last_lines(self, rank: int) -> list[str]:
        return list(self._last.get(rank, ()))

    def log_of(self, rank: int) -> Path | None:
        return self._logs / f"rank-{rank}.log" if self._logs else None

    def close(self) -> None:
        self.flush()
        for file in self._files.values():
            file.close()

    def _show_held(self) -> None:
        _, output = self._held.popleft()
        same = _same(output.text)
        if same not in self._seen:
            self._seen.append(same)
            _print(f"[{output.rank}] {output.text}", output.error)

    def _remember(self, rank: int, line: str) -> None:
        line = _CONTROL.sub("", line).rstrip()
        if not line:
            return
        self._last.setdefault(rank, deque(maxlen=LAST_LINES)).append(line)
        if (path := self.log_of(rank)) is not None:
            if rank not in self._files:
                self._files[rank] = path.open("a", encoding="utf-8", buffering=1)
            self._files[rank].write(f"{line}\n")


def _matters(output: Output) -> bool:
    return bool(_MATTERS.search(output.text) or _GLOG.match(output.text))


def _same(text: str) -> str:
    """The text without its numbers, so that times and processes of a log line do not differ."""
    return _NUMBERS.sub("#", text)


def _print(text: str, is_error: bool) -> None:
    try:
        print(text, file=sys.stderr if is_error else sys.stdout, flush=True)
    except BrokenPipeError:  # the reader has gone; the run goes on
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
