"""The rate that a run shows: of engines that return when a step is dispatched, or done."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxspeed.config.run_sections import WatchdogSection
from jaxspeed.metrics import Progress, TimeLedger
from jaxspeed.run import step_records
from jaxspeed.run.step_records import Recorder
from jaxspeed.run.trainer import LAG
from jaxspeed.run.watchdog import Watchdog

pytestmark = pytest.mark.fast

SECONDS, STEPS, BATCH, TOKENS = 0.5, 12, 4, 100


class Clock:
    """Seconds that pass only where something takes time."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(step_records.time, "perf_counter", lambda: self.now)


class Output:
    def __init__(self, clock, ready_at, later):
        self.clock, self.ready_at, self.later = clock, ready_at, later

    def is_ready(self):
        """On all devices: some time after the metrics could be read."""
        return self.clock.now >= self.ready_at + self.later

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.ready_at + self.later)


def paces(clock, ready_in, returns_in, every=None, later=0.0, compiles=0.0, steps=STEPS):
    """Each step's pace, and the ledger, of a loop as the trainer's."""
    program = SimpleNamespace(batch=SimpleNamespace(train=BATCH))
    ledger = TimeLedger(clock=lambda: clock.now)
    console = Progress(STEPS, console=Console(quiet=True))
    recorder = Recorder(
        SimpleNamespace(program=program),
        [],
        console,
        ledger,
        None,
        lambda _: [],
        Watchdog(WatchdogSection()),
    )
    found, pending, device = [], [], clock.now

    def read(count):
        with recorder.phase("compute"):
            clock.now = max(clock.now, pending[count - 1].ready_at)
        del pending[:count]
        found.extend(recorder.arrived([TOKENS] * count))

    with recorder:
        for step in range(1, steps + 1):
            with recorder.phase("data"):
                clock.now += 0.1
            with recorder.phase("compute"):
                clock.now += 7.0 if step == 1 else 0.0  # compilation
                device = max(device, clock.now) + ready_in
                output = Output(clock, device, later)
                clock.now += returns_in
            recorder.sent(output)
            pending.append(output)
            if len(pending) > LAG:
                read(1)
            if every and step % every == 0:
                read(len(pending))
                with recorder.phase("checkpoint"):
                    clock.now += 3.0
        if compiles:  # what a run shows at its end, while the last steps are in flight
            with recorder.phase("evaluate"):
                clock.now += compiles
        if pending:
            read(len(pending))
    return found, ledger.seconds()


@pytest.mark.parametrize("every", [None, 1, 5])
def test_steps_that_are_done_on_return_have_their_own_seconds(monkeypatch, every):
    found, wall = paces(Clock(monkeypatch), SECONDS, SECONDS, every)
    for pace in found[1:]:  # the first one compiles
        assert pace["step_seconds"] == pytest.approx(SECONDS + 0.1)
        assert pace["tokens_per_second"] == pytest.approx(TOKENS / (SECONDS + 0.1))
        assert pace["data_seconds"] == pytest.approx(0.1)
    parts = wall["compute"] + wall["data"] + wall["compile"]
    assert sum(pace["step_seconds"] for pace in found) == pytest.approx(parts - 0.1)


@pytest.mark.parametrize("later", [0.0, 0.01])
@pytest.mark.parametrize("every", [None, 5])
def test_steps_in_flight_have_the_seconds_of_the_devices(monkeypatch, every, later):
    found, wall = paces(Clock(monkeypatch), SECONDS, 0.0, every, later)
    total = sum(pace["step_seconds"] for pace in found)
    assert total == pytest.approx(wall["compute"] + wall["data"], abs=0.11)
    # Those that are read together have their mean; afterwards, a step's time is the devices'.
    assert found[-1]["step_seconds"] == pytest.approx(SECONDS, abs=0.11)


@pytest.mark.parametrize("compiles", [0.1, 60.0])
def test_steps_in_flight_while_something_else_compiles_have_their_seconds(monkeypatch, compiles):
    found, _ = paces(Clock(monkeypatch), SECONDS, 0.0, compiles=compiles)
    assert len(found) == STEPS
    for pace in found[-LAG:]:
        assert pace["step_seconds"] == pytest.approx(SECONDS, abs=0.11)


@pytest.mark.parametrize("steps", [1, 2, LAG])
@pytest.mark.parametrize("compiles", [0.1, 60.0])
def test_a_run_of_few_steps_has_their_seconds(monkeypatch, compiles, steps):
    """Something else compiles before any of them was timed."""
    found, _ = paces(Clock(monkeypatch), SECONDS, 0.0, compiles=compiles, steps=steps)
    assert len(found) == steps
    for pace in found:
        assert pace["step_seconds"] == pytest.approx(SECONDS, abs=0.11)
