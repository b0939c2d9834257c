"""What a person sees while a run goes: on a terminal one line that moves, elsewhere plain lines."""

import io
import logging
import sys

import pytest
from rich.console import Console
from rich.logging import RichHandler

from jaxspeed.metrics import Progress

pytestmark = pytest.mark.fast


def record(step, **more):
    return {"step": step, "loss": 10 / step, "tokens_per_second": 12_345.6, **more}


def run(progress, clock, steps, seconds=1.0):
    for step in steps:
        clock.now += seconds
        progress.update(record(step))


# -- a terminal ---------------------------------------------------------------------------------


def test_a_terminal_has_one_line_with_step_loss_speed_and_time_left(screen, clock):
    with screen, Progress(400, clock=clock) as progress:
        run(progress, clock, range(1, 101), seconds=0.5)
        progress.update({"step": 100, "eval_loss": 0.2})
    (line,) = screen.lines()
    assert line.endswith("100/400  loss 0.1000  held-out 0.2000  12.3k tokens/s  2:30 left")
    assert line.startswith("━━")
    assert screen.cursor_is_shown()


@pytest.mark.parametrize("screen", [30, 40, 60, 80, 120, 200], indirect=True)
def test_the_line_fits_and_shows_the_step_at_any_width(screen, clock):
    with screen, Progress(1_000_000, clock=clock) as progress:
        run(progress, clock, range(123_456, 123_459))
        progress.update({"step": 123_458, "eval_loss": 12.3456})
    (line,) = screen.lines()
    assert len(line) < screen.columns
    assert "123458/1000000" in line
    assert ("loss 8.10e-05" in line) == (screen.columns >= 40)
    assert ("left" in line) == (screen.columns >= 60)
    assert ("held-out" in line) == (screen.columns >= 120)


def test_other_output_appears_above_the_line_unbroken(screen, clock):
    logger = logging.getLogger("a library")
    with screen:
        handler = logging.StreamHandler(sys.stderr)  # it was made before the line moved
        logger.addHandler(handler)
        with Progress(100, clock=clock) as progress:
            run(progress, clock, range(1, 4))
            logger.warning("a warning that was logged")
            print("printed by someone")
            print("an error", file=sys.stderr)
            progress.say("[bold]said[/bold]")
            run(progress, clock, range(4, 6))
        assert handler.stream is screen.file
        logger.warning("logged afterwards")
        logger.removeHandler(handler)
    *above, line, after = screen.lines()
    assert above == ["a warning that was logged", "printed by someone", "an error", "said"]
    assert "5/100  loss 2.000" in line
    assert after == "logged afterwards"


@pytest.fixture
def of_rich():
    """A logger as the command line has it: Rich's handler, of a console for standard errors."""
    logger = logging.getLogger("of rich")
    handler = RichHandler(
        console=Console(stderr=True, soft_wrap=True), show_path=False, show_time=False
    )
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)


def test_a_log_message_of_the_command_line_leaves_one_live_line(screen, clock, of_rich):
    with screen:
        with Progress(100, clock=clock) as progress:
            run(progress, clock, range(1, 4))
            progress._live._live.refresh()
            of_rich.warning("step 3: the gradient norm " + "was clipped " * 9)
            run(progress, clock, range(4, 6))
        of_rich.warning("logged afterwards")
    lines = screen.lines()
    assert sum("/100" in line for line in lines) == 1 and "5/100" in lines[-2]
    assert lines[0].startswith("WARNING  step 3: the gradient norm was clipped")
    assert sum(line.count("clipped") for line in lines) == 9
    assert lines[-1] == "WARNING  logged afterwards"


def test_redirected_log_messages_stay_in_their_file(screen, clock, of_rich, monkeypatch):
    errors = io.StringIO()
    with screen:
        monkeypatch.setattr(sys, "stderr", errors)
        with Progress(100, clock=clock) as progress:
            run(progress, clock, range(1, 4))
            of_rich.warning("for the file")
    assert errors.getvalue().split() == ["WARNING", "for", "the", "file"]
    assert len(screen.lines()) == 1


def test_ctrl_c_leaves_the_last_state_and_the_cursor(screen, clock):
    with screen:
        with pytest.raises(KeyboardInterrupt), Progress(100, clock=clock) as progress:
            run(progress, clock, range(1, 4))
            raise KeyboardInterrupt
        assert (sys.stdout, sys.stderr) == (screen.file, screen.file)
        print("the next line")
    line, after = screen.lines()
    assert "3/100  loss 3.333" in line
    assert after == "the next line"
    assert screen.cursor_is_shown()


def test_what_takes_long_is_named(screen, clock):
    with screen, Progress(100, clock=clock) as progress:
        with progress.doing("compiling"):
            progress._live._live.refresh()
        run(progress, clock, range(1, 4))
    assert "0/100  compiling" in screen.written().replace("\x1b[0m", "").replace("\x1b[2m", "")
    assert "compiling" not in screen.lines()[0]


def test_redirected_errors_stay_in_their_file(screen, clock, monkeypatch):
    errors = io.StringIO()
    with screen:
        monkeypatch.setattr(sys, "stderr", errors)
        with Progress(100, clock=clock) as progress:
            run(progress, clock, range(1, 4))
            print("for the file", file=sys.stderr)
    assert errors.getvalue() == "for the file\n"
    assert len(screen.lines()) == 1


def test_a_loss_that_is_not_finite_is_shown(screen, clock):
    with screen, Progress(100, clock=clock) as progress:
        progress.update(record(1) | {"loss": float("nan")})
    assert "loss nan" in screen.lines()[0]


# -- elsewhere ----------------------------------------------------------------------------------


def plain(total, clock, **how):
    out = io.StringIO()
    return Progress(total, console=Console(file=out), clock=clock, **how), out


def test_a_pipe_gets_plain_lines_at_the_first_and_last_step_and_every_ten_seconds(clock):
    progress, out = plain(60, clock)
    with progress:
        run(progress, clock, range(1, 61), seconds=1.0)
    assert out.getvalue().splitlines() == [
        "step  1/60  loss 10.00  12.3k tokens/s",
        "step 11/60  loss 0.9091  12.3k tokens/s  0:49 left",
        "step 21/60  loss 0.4762  12.3k tokens/s  0:39 left",
        "step 31/60  loss 0.3226  12.3k tokens/s  0:29 left",
        "step 41/60  loss 0.2439  12.3k tokens/s  0:19 left",
        "step 51/60  loss 0.1961  12.3k tokens/s  0:09 left",
        "step 60/60  loss 0.1667  12.3k tokens/s  1:00 total",
    ]


def test_a_held_out_loss_has_a_line_of_its_own_step(clock):
    progress, out = plain(60, clock)
    with progress:
        run(progress, clock, range(1, 6))
        progress.update({"step": 5, "eval_loss": 2.5})
        run(progress, clock, range(6, 61))
        progress.update({"step": 60, "eval_loss": 1.25})
    told = {line[5:10].strip(): "held-out" in line for line in out.getvalue().splitlines()}
    assert told.pop("5/60") and told.pop("60/60")
    assert not any(told.values())


def test_a_long_run_writes_fewer_lines_the_longer_it_lasts(clock):
    progress, out = plain(100_000, clock)
    with progress:
        run(progress, clock, range(1, 100_001), seconds=7.0)  # eight days
    assert 100 < len(out.getvalue().splitlines()) < 1000


@pytest.mark.parametrize("colour", ["FORCE_COLOR", "CLICOLOR_FORCE"])
def test_colour_asked_for_makes_no_terminal_of_a_pipe(clock, monkeypatch, colour):
    monkeypatch.setenv(colour, "1")
    progress, out = plain(2, clock)
    with progress:
        run(progress, clock, [1, 2])
    assert "\x1b[2K" not in out.getvalue() and "\r" not in out.getvalue()
    assert len(out.getvalue().splitlines()) == 2


def test_a_dumb_terminal_gets_plain_lines(screen, clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with screen, Progress(2, clock=clock) as progress:
        run(progress, clock, [1, 2])
    assert [line.split("  ")[0] for line in screen.lines()] == ["step 1/2", "step 2/2"]


def test_an_interrupted_run_shows_its_last_step(clock):
    progress, out = plain(100, clock)
    with pytest.raises(KeyboardInterrupt), progress:
        run(progress, clock, range(1, 5))
        raise KeyboardInterrupt
    assert out.getvalue().splitlines()[-1].startswith("step   4/100")


def test_samples_per_second_are_shown_without_tokens(clock):
    progress, out = plain(10, clock)
    progress.update({"step": 1, "loss": 1.0, "samples_per_second": 2_000_000})
    assert out.getvalue() == "step  1/10  loss 1.000  2.00M samples/s\n"


# -- the time left ------------------------------------------------------------------------------


def test_the_time_left_follows_the_pace_of_the_last_half_minute(clock):
    progress, _ = plain(1000, clock)
    run(progress, clock, range(1, 11), seconds=60.0)  # a slow beginning
    run(progress, clock, range(11, 111), seconds=1.0)
    assert progress.seconds_left() == pytest.approx(890, rel=0.05)


def test_steps_done_before_a_restart_and_compiling_are_no_part_of_the_pace(clock):
    progress, _ = plain(1000, clock, start_step=900)
    assert progress.seconds_left() is None
    clock.now += 300  # compiling
    run(progress, clock, range(901, 911), seconds=2.0)
    assert progress.seconds_left() == pytest.approx(180)
