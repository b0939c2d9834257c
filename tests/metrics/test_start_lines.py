"""The phases of a start: a live line in a terminal, lines of text in a pipe, nothing if short."""

import io
import time

import pytest
from rich.console import Console

from jaxspeed.metrics import start_lines as module
from jaxspeed.metrics.start_lines import start_lines

pytestmark = pytest.mark.fast


def test_a_terminal_counts_the_seconds_of_a_phase_and_keeps_one_line(screen, clock):
    with screen:
        showing = start_lines(Console(), clock)
        with showing("compiling the step"):
            clock.now += 3.2
            time.sleep(0.6)  # it is painted four times per second
            print("printed while it compiles")
        with showing("reading the data"):
            clock.now += 0.2
    assert "compiling the step  3 s" in screen.written()
    assert screen.lines() == ["printed while it compiles", "compiling the step: 3.2 s"]


def test_a_pipe_gets_a_line_once_a_phase_lasts_and_one_with_its_seconds(clock, monkeypatch):
    monkeypatch.setattr(module, "LATE", 0.05)
    out = io.StringIO()
    showing = start_lines(Console(file=out, width=80), clock)
    with showing("compiling the step"):
        deadline = time.monotonic() + 5
        while not out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert out.getvalue() == "compiling the step ...\n"  # before it is over
        clock.now += 3.25
    with showing("reading the data"):
        pass
    assert out.getvalue().splitlines()[1:] == ["compiling the step: 3.2 s"]


def test_a_phase_that_fails_leaves_no_line_but_the_error(screen, clock):
    with screen:
        with pytest.raises(ValueError, match="wrong"), start_lines(Console(), clock)("tracing"):
            clock.now += 9
            raise ValueError("wrong")
        print("error: wrong")
    assert screen.lines() == ["error: wrong"] and screen.cursor_is_shown()


@pytest.mark.parametrize("name", ["JAX_PROCESS_ID", "SLURM_PROCID"])
def test_one_of_several_processes_shows_them(clock, monkeypatch, name):
    out = io.StringIO()
    monkeypatch.setenv(name, "1")
    with start_lines(Console(file=out), clock)("compiling"):
        clock.now += 9
    assert not out.getvalue()
