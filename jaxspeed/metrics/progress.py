"""Progress of a run: a live line in a terminal, plain lines elsewhere."""

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxspeed.metrics.format import clock_text, count_text, loss_text

_HELD_OUT = {"eval_loss", "eval_reward"}
_BAR = (10, 40)  # columns of the bar, at least and at most
_RECENT = 30.0  # seconds: window of the pace from which the time left is estimated


class Progress:
    """Step, loss, speed and time left.

        with Progress(total=1000) as progress:
            progress.update(record)     # its step, loss, tokens_per_second, eval_loss are shown
            with progress.doing("saving"): ...
            progress.say("any text")    # a separate line above the live one

    Other output of `print` or `logging` appears above the live line. If the console is not a
    terminal, a line is written at the first and the last step, with each held-out loss, and in
    between at most every ten seconds, less often the longer the run lasts.

    Args:
      total: the last step of the run.
      start_step: number of steps done before.
      console: standard output by default.
      clock: seconds, for tests.
    """

    def __init__(
        self,
        total: int,
        start_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._step = total, start_step
        self._console = console or Console()
        self._clock = clock
        self._shown: dict[str, Any] = {}
        self._doing = ""
        self._paces: deque[tuple[float, int]] = deque()
        self._began = clock()
        self._last_line = -math.inf
        self._last_said = -1
        is_live = is_watched(self._console)
        self._live = LiveLine(self._console, lambda: self, stays=True) if is_live else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The last state stays on the screen, whatever ended the run."""
        if self._live:
            self._live.__exit__()
        elif self._shown and self._last_said != self._step:
            self._plain_line()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the new values; those that a record lacks stay as they were."""
        now = self._clock()
        step = int(record.get("step", self._step))
        if step != self._step or not self._paces:
            self._paces.append((now, step))
        while len(self._paces) > 2 and now - self._paces[1][0] >= _RECENT:
            self._paces.popleft()
        self._step = step
        self._shown |= {name: record[name] for name in _NUMBERS if record.get(name) is not None}
        if self._live is None and self._is_due(now, _HELD_OUT & record.keys()):
            self._plain_line()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show `what` instead of the time left during the `with` block."""
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before

    def say(self, *shown: Any) -> None:
        """Print anything that Rich can print above the live line."""
        self._console.print(*shown, soft_wrap=self._live is None)

    def seconds_left(self) -> float | None:
        """Estimate from the pace of the last 30 s; None before the second step."""
        if len(self._paces) < 2:
            return None
        (then, first), (now, last) = self._paces[0], self._paces[-1]
        if last <= first:
            return None
        return (self._total - self._step) * (now - then) / (last - first)

    # -- rendering ------------------------------------------------------------------------------

    def _is_due(self, now: float, evaluated: Any) -> bool:
        between = max(10.0, 0.01 * (now - self._began))
        return bool(evaluated) or now - self._last_line >= between

    def _plain_line(self) -> None:
        self._last_line, self._last_said = self._clock(), self._step
        text = f"step {self._of_total()}  " + "  ".join(part.plain for part in self._parts())
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        for name in _HELD_OUT:  # said once, with its own step
            self._shown.pop(name, None)

    def _of_total(self) -> str:
        return f"{self._step:>{len(str(self._total))}}/{self._total}"

    def _parts(self) -> list[Text]:
        """The shown values, in order."""
        shown = [Text(*_NUMBERS[name](value)) for name, value in _in_order(self._shown)]
        left = self.seconds_left()
        if self._doing:
            shown.append(Text(self._doing, "dim"))
        elif left is not None and self._step < self._total:
            shown.append(Text(f"{clock_text(left)} left", "cyan"))
        elif self._step >= self._total:
            shown.append(Text(f"{clock_text(self._clock() - self._began)} total", "cyan"))
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = [Text(self._of_total(), "bold"), *self._parts()]
        room = options.max_width - 1  # the last column makes some terminals wrap
        # On a narrow terminal the least important parts are dropped: held-out loss, speed.
        for dropped in ("held-out", "/s"):
            if _width(parts) + _BAR[0] > room:
                parts = [part for part in parts if dropped not in part.plain]
        bar = min(_BAR[1], room - _width(parts))
        while len(parts) > 1 and _width(parts) - 2 > room:
            parts.pop()
        line = Table.grid(padding=(0, 2, 0, 0))
        done = ProgressBar(self._total, self._step, width=bar, complete_style="cyan")
        line.add_row(*([done] if bar >= 4 else []), *parts)
        yield line


class LiveLine:
    """A line at the end of a terminal: painted four times per second, with other output above it.

    Args:
      console: of the terminal.
      line: what stands on it now.
      stays: whether its last state stays on the screen.
    """

    def __init__(self, console: Console, line: Callable[[], Any], stays: bool = False) -> None:
        self._live = Live(
            get_renderable=line,
            console=console,
            refresh_per_second=4,
            transient=not stays,
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._following = written_above(console)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        self._following.__enter__()
        return self

    def __exit__(self, *caught: Any) -> None:
        self._following.__exit__(None, None, None)
        self._live.stop()


def is_watched(console: Console) -> bool:
    """Whether a live line can be shown; FORCE_COLOR alone does not make a pipe a terminal."""
    return console.is_interactive and is_terminal(console.file)


def _width(parts: list[Text]) -> int:
    """Columns of the parts, each with the gap before it."""
    return sum(part.cell_len + 2 for part in parts)


def _loss(value: float) -> tuple[str, str]:
    return f"loss {loss_text(float(value))}", "" if math.isfinite(value) else "bold red"


def _held_out(value: float) -> tuple[str, str]:
    return f"held-out {loss_text(float(value))}", "yellow"


def _named(name: str, form: str = ".3g") -> Callable[[Any], tuple[str, str]]:
    return lambda value: (f"{name} {float(value):{form}}", "")


_NUMBERS: dict[str, Callable[[Any], tuple[str, str]]] = {
    "loss": _loss,
    "reward": _named("reward", ".3f"),
    "eval_reward": lambda value: (f"held-out reward {float(value):.3f}", "yellow"),
    "completions/mean_length": _named("length"),
    "kl": _named("KL"),
    "entropy": _named("entropy"),
    "eval_loss": _held_out,
    "tokens_per_second": lambda value: (f"{count_text(value)} tokens/s", "green"),
    "samples_per_second": lambda value: (f"{count_text(value)} samples/s", "green"),
}


def _in_order(shown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values in the order of `_NUMBERS`; tokens per second rather than samples per second."""
    for name in _NUMBERS:
        if name in shown and not (name == "samples_per_second" and "tokens_per_second" in shown):
            yield name, shown[name]


# -- other output must appear above the live line, not in it -----------------------------------


def is_terminal(stream: Any) -> bool:
    """Whether the stream is a terminal; output redirected to a file stays redirected."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


@contextmanager
def written_above(console: Console) -> Iterator[None]:
    """Redirect `logging` handlers of the terminal to Rich's proxies, and Rich's to the console.

    Rich replaces `sys.stdout` and `sys.stderr` during a live display, but a handler that was
    created before has the original stream. A handler of Rich's own writes to its console's stream
    itself, where the live line stands. One whose stream is redirected to a file is left alone.
    """
    stand_ins = {
        id(stream.rich_proxied_file): stream
        for stream in (sys.stdout, sys.stderr)
        if hasattr(stream, "rich_proxied_file")
    }
    moved, shown_on = [], []
    for handler in _handlers():
        if isinstance(of_handler := getattr(handler, "console", None), Console):
            if is_terminal(of_handler.file):
                handler.console = console  # type: ignore[attr-defined]
                shown_on.append((handler, of_handler))
            continue
        stream = getattr(handler, "stream", None)
        if isinstance(handler, logging.StreamHandler) and id(stream) in stand_ins:
            handler.setStream(stand_ins[id(stream)])
            moved.append((handler, stream))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
        for of_rich, before in shown_on:
            of_rich.console = before  # type: ignore[attr-defined]


def _handlers() -> list[logging.Handler]:
    """The handlers of all loggers, each once."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return list({id(handler): handler for handler in handlers}.values())
