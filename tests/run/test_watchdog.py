"""The watchdog's decisions, with messages in a dict and a clock of the test's."""

import os
import signal
import threading

import jax
import pytest

from jaxspeed.config import Config
from jaxspeed.engine.jax_setup import start_devices
from jaxspeed.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    ExitCode,
    PeerError,
    exit_code,
)
from jaxspeed.run import signals
from jaxspeed.run.ending import message
from jaxspeed.run.heartbeats import Heartbeats, shown
from jaxspeed.run.sections import FACTOR, FIRST, FLOORS, TimeOuts
from jaxspeed.run.signals import StopRequest
from jaxspeed.run.watchdog import Watchdog, slowest

pytestmark = pytest.mark.fast


class Store:
    """The key-value store of JAX's coordination service."""

    def __init__(self):
        self.values, self._is_new = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: config key")
        with self._is_new:
            self.values[key] = value
            self._is_new.notify_all()

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: config key")
        return self.values[key]

    def key_value_dir_get(self, prefix):
        with self._is_new:
            return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]

    def blocking_key_value_get(self, key, milliseconds):
        with self._is_new:
            if not self._is_new.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.values[key]


def configured(**given):
    return Config.load({"run": {"watchdog": given}}).run.watchdog


class Run:
    """Watchdogs of several processes, none with a thread."""

    def __init__(self, count, **given):
        self.now, self.store, self.ended = 0.0, Store(), {}
        section = configured(**given)
        self.dogs = [
            Watchdog(
                section,
                Heartbeats(self.store, rank, count),
                clock=lambda: self.now,
                end=lambda code, rank=rank: self.ended.update({rank: code}),
            )
            for rank in range(count)
        ]
        for rank, dog in enumerate(self.dogs):
            dog._here = {**dog._here, "host": f"host{rank}"}

    def beat(self, *ranks):
        for rank in ranks:
            self.dogs[rank].check(self.now)
            self.dogs[rank].exchange()

    def notice(self, seconds=0):
        return Heartbeats(self.store, 0, len(self.dogs)).next_notice(seconds)


def test_a_time_out_is_learnt_and_never_below_its_floor():
    limits = TimeOuts(configured(save=7.0))
    assert limits.of("step") == FLOORS["compile"]  # the first ones wait for a compilation
    limits.took("step", 900.0)  # it compiled
    for _ in range(FIRST):
        limits.took("step", 1.0)
    assert limits.of("step") == FLOORS["step"]
    limits.took("step", 200.0)
    assert limits.of("step") == FACTOR * 200.0
    for _ in range(FIRST):
        limits.took("save", 100.0)
    assert limits.of("save") == 7.0  # as the config says


@pytest.mark.parametrize("section", list(FLOORS))
def test_a_time_out_of_the_config_is_that_of_its_section(section):
    limits = TimeOuts(configured(**{section: 7.0}))
    limits.took(section, 100.0)
    assert limits.of(section) == 7.0


def test_a_watchdog_can_be_disabled_among_processes():
    run = Run(2, enabled=False)
    run.beat(0, 1)
    run.now = 1e6
    run.beat(1)
    run.beat(0)
    assert run.notice() is None


@pytest.mark.parametrize("section", ["compile", "step"])
def test_a_first_compilation_of_ten_minutes_is_no_false_alarm(section):
    """In the section `compile`, or in the first step: heartbeats go on, and nothing is posted."""
    run = Run(2)
    for dog in run.dogs:
        dog.sections.enter(section)
    for run.now in range(0, 600, 5):
        run.beat(0, 1)
    assert run.notice() is None and not run.ended


LATE = (
    "Unable to initialize backend 'cpu': INTERNAL: Getting local topologies failed: Error 1: "
    "GetKeyValue() timed out with key: cpu:local_topology/cpu/1 and duration: 2m (set "
    "JAX_PLATFORMS='' to automatically choose an available backend)"
)


def test_a_process_whose_devices_are_late_is_named_not_those_that_wait_for_it(monkeypatch, capfd):
    """JAX's own time-out, which is shorter than that of the section."""
    run = Run(3)
    run.beat(0, 1, 2)
    monkeypatch.setattr("jaxspeed.run.watchdog.time.sleep", lambda seconds: None)
    run.dogs[2].failed(RuntimeError(LATE))
    notice = run.notice()
    assert (notice["rank"], notice["why"]) == (1, "stuck")
    said = "jaxspeed: process 1 on host1, in start: its devices have not started; JAX's time-out is"
    assert message(notice) == f"{said} 2m"
    assert run.ended == {2: ExitCode.PEER}
    assert "Traceback" not in capfd.readouterr().err
    run.dogs[1]._end(notice)
    assert run.ended[1] == ExitCode.HANG


def test_devices_of_another_process_that_are_late_are_no_fault_of_the_config(monkeypatch):
    def devices():
        raise RuntimeError(LATE)

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr("jaxspeed.engine.jax_setup.start_processes", lambda seconds: None)
    before = jax.config.jax_platforms
    try:
        with pytest.raises(RuntimeError, match="local_topology"):
            start_devices("gpu")
    finally:
        jax.config.update("jax_platforms", before)


def test_the_process_that_is_furthest_behind_is_named_not_those_that_wait_for_it():
    run = Run(3, step=10.0)
    for dog in run.dogs:
        dog.tick(4)
        dog.sections.enter("step")
    for rank in (0, 2):  # they have sent more steps, and wait for one of process 1
        run.dogs[rank].tick(6)
    run.beat(0, 1, 2)
    run.now = 11.0
    run.beat(2, 1, 0)
    fault = run.notice()
    assert (fault["rank"], fault["why"], fault["section"]) == (1, "stuck", "step 5")
    assert message(fault) == (
        "jaxspeed: process 1 on host1, in step 5: stuck for 11 s; the time-out of "
        "run.watchdog.step is 10 s"
    )
    assert [line.partition(", at")[0] for line in fault["positions"]] == [
        "  processes 0, 2: step 7",
        "  process 1: step 5",
    ]
    run.dogs[1]._end(fault)
    run.dogs[2]._end(fault)
    assert run.ended == {1: ExitCode.HANG, 2: ExitCode.PEER}


def test_those_that_wait_for_a_long_compilation_of_another_process_do_not_end_it():
    run = Run(2, silence=1e6, step=10.0, compile=1000.0)
    run.dogs[1].sections.enter("compile")
    run.dogs[0].sections.enter("compile")
    run.dogs[0].sections.enter("step")
    run.beat(0, 1)
    run.now = 500.0
    run.beat(1, 0)
    assert run.notice() is None
    run.now = 1001.0
    run.beat(1, 0)
    assert run.notice()["rank"] == 1


def test_a_wait_with_a_limit_of_its_own_is_neither_stuck_nor_progress():
    """Such as for rewards, of which processes have different numbers."""
    run = Run(2, silence=1e6, rewards=10.0)
    for dog in run.dogs:
        dog.sections.enter("rewards")
    count = run.dogs[0].beat()["count"]
    for run.now in (8.0, 16.0):
        run.dogs[0].waits()
    run.dogs[1].sections.resumed(10.0)
    run.beat(1, 0)
    assert run.notice() is None
    assert [dog.beat()["count"] for dog in run.dogs] == [count] * 2
    run.now = 21.0
    run.beat(1, 0)
    assert run.notice()["rank"] == 1


def test_a_process_without_a_heartbeat_counts_as_dead_and_a_suspended_run_does_not():
    run = Run(3, silence=60.0)
    run.beat(0, 1, 2)
    for run.now in range(0, 60, 5):
        run.beat(0, 1)
    assert run.notice() is None
    run.now = 61.0
    run.beat(0, 1)
    fault = run.notice()
    assert (fault["rank"], fault["why"], fault["host"]) == (2, "silent", "host2")
    other = Run(2, silence=60.0)
    other.beat(1, 0)
    other.now = 5000.0
    for dog in other.dogs:
        dog._resumed(other.now)
    other.beat(0, 1)
    assert other.notice() is None and not other.ended


def test_a_coordination_service_that_does_not_answer_ends_the_process():
    run = Run(2, silence=60.0)
    run.beat(0, 1)
    run.now = 61.0
    run.dogs[1].check(run.now)
    assert run.ended == {1: ExitCode.PEER}


@pytest.mark.parametrize("done", [0, 1])
def test_a_process_that_is_done_may_end_before_the_others_which_are_watched_still(done):
    run = Run(2, silence=60.0, evaluate=300.0)
    run.dogs[1 - done].sections.enter("evaluate")
    run.beat(1, 0)
    run.dogs[done].close()
    for run.now in range(0, 300, 5):
        run.beat(1 - done)
    assert run.notice() is None
    run.now = 301
    run.beat(1 - done)
    fault = run.notice()
    assert (fault["rank"], fault["why"]) == (1 - done, "stuck")


def test_all_may_post_at_once_and_one_fault_is_kept():
    """N processes that fail together would otherwise try N numbers each."""
    run = Run(50)
    calls = []
    store_set = run.store.key_value_set
    run.store.key_value_set = lambda *args, **kw: (calls.append(args), store_set(*args, **kw))
    for rank, dog in enumerate(run.dogs):
        dog.beats.post({"kind": "stop", "signal": 15})
        dog.beats.post({"kind": "fault", "rank": rank})
    assert len(calls) == 1 + 49 + 1 + 49 * 2 + 1  # each kind has one number
    read = Heartbeats(run.store, 0, 50)
    assert [read.next_notice(0)["kind"] for _ in range(2)] == ["stop", "fault"]
    assert read.next_notice(0) is None


@pytest.mark.parametrize(("count", "period", "wait"), [(4, 5, 1), (3000, 9, 3), (10_000, 15, 10)])
def test_heartbeats_are_rarer_in_large_runs(count, period, wait):
    dog = Watchdog(configured(), Heartbeats(Store(), 1, count))
    assert (dog.period, dog._wait) == (period, wait)


def test_a_signal_after_another_process_has_passed_its_own_on_is_the_first(monkeypatch):
    """A launcher's Ctrl-C is sent to all; a notice may be sooner than a busy process's handler."""
    ended = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run = Run(2)
    request = StopRequest(run.dogs[1])
    run.dogs[1]._listeners["stop"]({"kind": "stop", "signal": 2})
    request._asked(2, None)
    assert not ended and request.signal is signal.SIGINT and run.notice() is None
    request._asked(2, None)
    assert ended == [2]


def test_a_step_that_takes_long_after_a_signal_is_what_a_line_names(monkeypatch, caplog):
    for seconds, wait, lines in ((60.0, 0.0, 0), (0.01, 60.0, 1)):
        monkeypatch.setattr(signals, "SAY_SECONDS", seconds)
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert request.agreed()
            request._waiting.join(wait)
        request._waiting.join(5)
        assert not request._waiting.is_alive()
        assert caplog.text.count("SIGUSR1: the run ends once its current step is done") == lines


def test_all_processes_stop_at_the_same_call_whichever_is_ahead():
    run = Run(3)
    requests = [StopRequest(dog) for dog in run.dogs]
    for rank, calls in enumerate((4, 7, 5)):
        assert not any(requests[rank].agreed() for _ in range(calls))
    stop = {"kind": "stop", "signal": 15}
    for dog in run.dogs:
        dog._listeners["stop"](stop)
        dog._listeners["stop"](stop)  # a scheduler sends it to every process
    notice = run.notice(60)  # process 0 decides in a thread
    assert notice == {"kind": "stop at", "call": 8}
    for dog in run.dogs:
        dog._listeners["stop at"](notice)
    made = [
        next(i for i in range(calls + 1, 100) if r.agreed())
        for r, calls in zip(requests, (4, 7, 5))
    ]
    assert made == [8, 8, 8]
    assert {r.signal.name for r in requests} == {"SIGTERM"}


# -- calls of engines in a user's own loop ---------------------------------------------------------


class Output:
    """What a step dispatched."""

    computed = False

    def is_ready(self):
        return self.computed


def call(dog, name, step, output=None):
    with dog.call(name, step) as sent:
        sent(output)


def in_loops(count, **given):
    """Processes with an engine each."""
    run = Run(count, silence=1e6, **given)
    for dog in run.dogs:
        dog.opened()
        call(dog, "start", 0)
    return run


def test_a_step_lasts_until_its_output_is_computed_and_then_the_time_is_the_users():
    (dog,) = (run := in_loops(1, step=6.0, user_code=4.0)).dogs
    output = Output()
    call(dog, "step", 3, output)
    run.now = 5.0
    assert dog.beat()["section"] == "step" and dog.beat()["step"] == 3
    output.computed = True
    beat = dog.beat()
    assert (beat["section"], beat["step"], beat["seconds"], beat["limit"]) == ("user_code", 4, 0, 4)
    call(dog, "step", 4, Output())
    call(dog, "step", 5, Output())  # before the one before it is computed
    assert dog.beat()["section"] == "step" and dog.beat()["step"] == 5
    call(dog, "save", 6)
    assert dog.beat()["section"] == "user_code"
    assert dog.sections._time_outs._longest["step"] == 0.0  # of others than the first: at once


def test_user_code_beyond_its_bound_ends_the_run_and_is_named():
    run = in_loops(3, step=10.0, user_code=20.0)
    for dog in run.dogs:
        call(dog, "step", 4)
    for rank in (0, 2):
        run.dogs[rank].sections.enter("step", 5)
    run.now = 15.0
    run.beat(1, 2, 0)
    assert run.notice() is None  # others wait beyond their time-outs
    run.now = 21.0
    run.beat(1, 2, 0)
    assert message(run.notice()) == (
        "jaxspeed: process 1 on host1, in user code after step 5: stuck for 21 s; the time-out of "
        "run.watchdog.user_code is 20 s"
    )


def test_user_code_has_no_bound_by_default_and_a_long_wait_for_it_is_logged_once(caplog):
    run = in_loops(2, step=10.0)
    for dog in run.dogs:
        call(dog, "step", 4)
    for run.now in (1e4, 2e4):  # all are slow, and none waits
        run.beat(1, 0)
    assert run.notice() is None and not caplog.records
    run.dogs[0].sections.enter("step", 5)
    for run.now in (20_009.0, 20_011.0, 20_016.0):
        run.beat(1, 0)
    assert run.notice() is None and [record.getMessage() for record in caplog.records] == [
        "process 1 on host1 has been in user code after step 5 for 20011 s, and process 0 waits "
        "for it in step 6; run.watchdog.user_code bounds the time of user code"
    ]


def test_one_that_has_not_come_to_its_engine_is_named_not_those_that_wait_for_it():
    run = in_loops(3, compile=30.0)
    for rank in (0, 1):
        run.dogs[rank].sections.enter("compile")
    run.beat(1, 0)
    run.now = 31.0
    run.beat(1, 0)
    fault = run.notice()
    assert message(fault) == (
        "jaxspeed: process 2: no heartbeat so far, and process 0 is in compile, stuck for 31 s; "
        "the time-out of run.watchdog.compile is 30 s"
    )
    assert fault["positions"][-1] == "  process 2: no heartbeat"


def test_an_exception_names_the_call_and_leaves_the_time_after_it_to_the_user():
    (dog,) = (run := in_loops(1, step=6.0, user_code=40.0)).dogs
    with pytest.raises(ValueError), dog.call("step", 2):
        raise ValueError
    beat = dog.beat()
    assert (beat["section"], beat["limit"], beat["bound"]) == ("step", 40.0, "user_code")
    run.now = 3.0
    call(dog, "step", 2)  # it is caught, and the loop goes on
    assert dog.beat()["section"] == "user_code" and dog.beat()["step"] == 3


def test_a_call_within_another_or_in_another_thread_belongs_to_that():
    (dog,) = in_loops(1).dogs
    with dog.call("step", 0):
        count = dog.beat()["count"]
        call(dog, "evaluate", 0)
        with pytest.raises(ValueError), dog.call("save", 0):
            raise ValueError
        other = threading.Thread(target=call, args=(dog, "save", 0))
        other.start()
        other.join()
        other = threading.Thread(target=dog.compiles)
        other.start()
        other.join()
        assert dog.beat()["section"] == "step" and dog.beat()["count"] == count
        dog.compiles()
        assert dog.beat()["section"] == "compile"
    assert dog.beat()["section"] == "user_code"


def test_after_its_last_engine_is_closed_nobody_waits_for_a_process():
    (dog,) = in_loops(1, user_code=4.0).dogs
    dog.opened()
    for left in ("user_code", "end"):
        with dog.call("save", 0):
            dog.closed()
        assert dog.beat()["section"] == left
    assert dog.beat()["limit"] is None
    with dog.call("start", 0):
        dog.opened()
    assert dog.beat()["section"] == "user_code"


def test_a_process_that_leaves_jaxs_service_is_watched_no_more(monkeypatch):
    """With its watchdog's threads: the service does not answer, which would end it."""
    ended = []
    section = configured(silence=0.4, user_code=0.1)
    dog = Watchdog(section, Heartbeats(Store(), 0, 2), end=ended.append)
    monkeypatch.setattr("jaxspeed.run.watchdog.distributed.global_state.client", object())
    dog.start()
    monkeypatch.setattr("jaxspeed.run.watchdog.distributed.global_state.client", None)
    for thread in dog._threads:
        thread.join(10)
        assert not thread.is_alive()
    dog.close()
    assert not ended


def test_processes_in_the_same_section_are_shown_together():
    beat = {"section": "step", "step": 11, "seconds": 3.0}
    beats = {0: beat, 1: {**beat, "seconds": 8.0}, 3: beat, 4: {**beat, "section": "save"}}
    assert shown(beats, 5) == [
        "  processes 0-1, 3: step 12, for 3 to 8 s",
        "  process 2: no heartbeat",
        "  process 4: save after step 11, for 3 to 3 s",
    ]


def test_the_process_that_the_others_wait_for_is_reported():
    beats = {rank: {"host": f"host{rank}", "own": 0.30} for rank in range(5)}
    assert slowest(beats) is None
    beats[3]["own"] = 0.80
    assert slowest(beats) == (
        "process 3 on host3 is slow: reading data and starting a step take it 0.80 s, the median "
        "process 0.30 s; all wait for it"
    )
    fast = {rank: {"host": "host", "own": own} for rank, own in enumerate((0.001, 0.001, 0.01))}
    assert slowest(fast) is None  # nobody would notice


def test_exit_codes_tell_how_a_run_ended():
    errors = (ConfigError(), CheckpointError(), DivergedError(), PeerError(), ValueError())
    assert [int(exit_code(error)) for error in errors] == [2, 1, 3, 5, 1]
