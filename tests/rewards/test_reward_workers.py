"""Reward functions in workers: TRL's form, limits of time, what fails, and what is left over."""

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxspeed.config.rollout_options import GrpoOptions
from jaxspeed.errors import ConfigError, RunError
from jaxspeed.rewards import scoring
from jaxspeed.rewards.reward_workers import RewardCall, RewardWorkers
from jaxspeed.rewards.scoring import RewardRow, Rewards, TrainerProgress
from tests.rewards import functions

pytestmark = pytest.mark.fast

HERE = "tests.rewards.functions"
FUNCTIONS = [
    name
    for name, x in vars(functions).items()
    if callable(x) and not inspect.isclass(x) and getattr(x, "__module__", HERE) == HERE
]
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.6
PROGRESS = TrainerProgress(3, 10, 0.5)


@pytest.fixture(scope="module")
def workers():
    """Two of all functions, shared by the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "tpu")  # as of a run on devices
        pool = RewardWorkers([f"{HERE}:{name}" for name in FUNCTIONS], 2, LIMIT)
    yield pool
    pool.close()


def ran(workers, name, columns=None, rows=3, calls=1):
    call = RewardCall(FUNCTIONS.index(name), columns or {}, {"prompts": ["x"] * rows}, {})
    answers = workers.run([call] * calls, False, lambda: None)
    return [answers[i] for i in range(calls)]


def wait_for_all(workers):
    while not all(worker.is_ready for worker in workers._workers):
        ran(workers, "environment")


def rewards_of(workers, *names, **options):
    """`Rewards` of functions with the shared workers."""
    numbers = [FUNCTIONS.index(name) for name in names]

    class Chosen:
        def run(self, calls, *rest):
            return workers.run([x._replace(function=numbers[x.function]) for x in calls], *rest)

    paths = [f"{HERE}:{name}" for name in names]
    rewards = Rewards(GrpoOptions(rewards=paths, **options), tokenizer=None, start=False)
    rewards._pool = Chosen()
    return rewards


def rows_of(groups, size=2, **columns):
    return [
        RewardRow(
            prompt="p" * (i + 1),
            completion="c" * (k + 1),
            tokens=(1,) * (k + 3),
            prompt_tokens=(2,),
            columns={name: values[i] for name, values in columns.items()},
            where=f"data.jsonl, line {i + 1}",
            prompt_number=i,
        )
        for i in range(groups)
        for k in range(size)
    ]


# -- the form --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_functions_get_what_trl_passes_and_rewards_come_by_row(workers, batch):
    rows = rows_of(3, answer=["c", None, "cc"], bonus=[0, 10, 20])
    rewards = rewards_of(workers, "length", "answered", "scorer", "keywords", reward_batch=batch)
    table = rewards.score(rows, PROGRESS)
    nan = np.nan
    wanted = [[1, 2] * 3, [1.5, 2, nan, nan, 1.5, 2], [1, 1, 12, 12, 23, 23], [8] * 6]
    np.testing.assert_array_equal(table.values, np.array(wanted).T)
    assert table.names == ["length", "answered", "scorer", "keywords"]
    assert table.logged == {"right": [True, False, False, False, False, True]}
    steps = [3 + 2 * min(batch, 3 - first) for first in range(0, 3, batch)]
    assert table.metrics == {"step": np.mean(steps)} and table.failures == []


def test_a_worker_imports_neither_jax_nor_jaxspeed_and_its_prints_go_to_stderr(workers, capfd):
    (answer,) = ran(workers, "environment")
    worker, *holds = answer["values"]
    assert worker != os.getpid() and holds == [1.0, 1.0]
    assert "printed by a reward" not in capfd.readouterr().out


def test_calls_run_at_once_in_the_workers(workers):
    wait_for_all(workers)
    naps = ran(workers, "naps", calls=2)
    assert len({answer["values"][0] for answer in naps}) == 2


# -- what fails ------------------------------------------------------------------------------------

FAILURES = {
    "raises": r"ValueError: a first line \(functions\.py, line \d+\)",
    "too_few": "returned 2 rewards for 3 completions",
    "not_finite": "returned nan among its rewards; None is for no reward",
    "texts": "returned '1.0' among its rewards, which is no number",
    "no_list": "returned float, and not a list of 3 numbers",
    "needs_more": "needs solution, hint; the columns of the records are answer",
    "short_column": r"log_extra\('x'\) has 1 values for 3 completions",
    "leaves": r"SystemExit: done \(functions\.py, line \d+\)",
    "dies": r"its process ended \(exit code 3\)",
    "is_killed": r"its process ended \(killed, probably because .*\)",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_call_that_fails_is_an_error_and_the_worker_or_a_new_one_goes_on(workers, name):
    (failed,) = ran(workers, name, {"answer": ["x"] * 3})
    assert re.fullmatch(FAILURES[name], failed["error"])
    assert len(ran(workers, "environment")[0]["values"]) == 3


def gone(*processes, within=5.0):
    """Whether these end within some seconds."""
    deadline = time.monotonic() + within
    while any(is_running(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def group_of(process):
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def processes_in(file, within=10.0):
    """The numbers that a reward has written: its own, and that of what it started."""
    deadline = time.monotonic() + within
    while not file.exists() or not file.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [*map(int, file.read_text().split())]


@pytest.mark.parametrize("errors", ["zero", "drop", "error"])
def test_a_reward_that_hangs_is_named_within_its_limit_and_killed(
    workers, errors, tmp_path, caplog
):
    file = tmp_path / "processes"
    rows = rows_of(3, child=[None, str(file), None])
    rewards = rewards_of(workers, "sleeps", "length", reward_error=errors)
    line = f"reward sleeps, data.jsonl, line 2: took more than {LIMIT} s (objective.reward_timeout)"
    begun = time.monotonic()
    if errors == "error":
        with pytest.raises(RunError, match=re.escape(line)):
            rewards.score(rows, PROGRESS)
    else:
        table = rewards.score(rows, PROGRESS)
        value = {"zero": 0.0, "drop": np.nan}[errors]
        wanted = [[1, 1, value, value, 1, 1], [1, 2] * 3]
        np.testing.assert_array_equal(table.values, np.array(wanted).T)
        assert table.failures == [line] and line in caplog.text
    assert time.monotonic() - begun < LIMIT + 1
    assert gone(*processes_in(file))
    assert len(ran(workers, "environment")[0]["values"]) == 3


def test_the_first_error_leaves_out_the_calls_behind_it(workers, tmp_path):
    """And what still runs is killed."""
    file = tmp_path / "processes"
    of = {name: FUNCTIONS.index(name) for name in ("sleeps", "raises", "length")}
    prompts = {"prompts": ["x"], "completions": ["y"]}
    calls = [
        RewardCall(of["sleeps"], {"child": [str(file)]}, prompts, {}),
        *[RewardCall(of["length"], {}, prompts, {})] * 3,
        RewardCall(of["raises"], {}, prompts, {}),
        RewardCall(of["length"], {}, prompts, {}),
    ]
    wait_for_all(workers)
    begun = time.monotonic()
    answers = workers.run(calls, True, lambda: None)
    assert time.monotonic() - begun < LIMIT
    assert [*answers] == [1, 2, 3, 4]
    assert not file.exists() or gone(*processes_in(file))


def test_an_interrupted_call_answers_no_later_one(workers):
    wait_for_all(workers)

    def interrupt():
        raise KeyboardInterrupt

    of = {name: FUNCTIONS.index(name) for name in ("environment", "naps")}
    calls = [
        RewardCall(of[name], {}, {"prompts": ["x"] * 3}, {}) for name in ("naps", "environment")
    ]
    with pytest.raises(KeyboardInterrupt):
        workers.run(calls, False, interrupt)  # after the answer of the second
    assert ran(workers, "environment")[0]["values"][1:] == [1.0, 1.0]


def test_calls_are_left_out_at_a_request_to_stop_that_comes_while_one_hangs(
    workers, monkeypatch, tmp_path
):
    """And the watchdog hears of the wait, however long the limit is."""
    monkeypatch.setattr("jaxspeed.rewards.reward_workers.LOOK_SECONDS", 0.05)
    wait_for_all(workers)
    rewards, looks, rows = (
        rewards_of(workers, "sleeps"),
        [],
        rows_of(1, child=[str(tmp_path / "x")]),
    )
    rewards._tick = lambda: looks.append(None)
    begun = time.monotonic()
    assert rewards.score(rows, PROGRESS, lambda: len(looks) > 2) is None
    assert len(looks) == 3 and time.monotonic() - begun < LIMIT / 2
    assert rewards_of(workers, "length").score(rows_of(3), PROGRESS, lambda: True) is None
    assert len(ran(workers, "environment")[0]["values"]) == 3


def test_completions_of_which_none_has_a_reward_are_named(workers, caplog):
    line = "none of 4 completions has a reward"
    rewards_of(workers, "answered").score(rows_of(2, answer=[None, "c"]), PROGRESS)
    assert line not in caplog.text
    rewards_of(workers, "answered").score(rows_of(2, answer=[None] * 2), PROGRESS)
    assert line in caplog.text


# -- before the run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"{HERE}:absent", "cannot be imported: AttributeError: module .* has no attribute"),
        (f"{HERE}:number", "cannot be imported: number is no function, but of type int"),
        ("no_module:length", "cannot be imported: ModuleNotFoundError: No module named"),
        ("length", "is neither a function package.module:name nor the folder of a reward model"),
    ],
)
def test_a_reward_that_is_not_there_is_an_error_before_the_run(path, why):
    options = GrpoOptions(rewards=[path], reward_workers=1)
    with pytest.raises(ConfigError, match=f"objective.rewards: {path} {why}"):
        Rewards(options, tokenizer=None)


def test_a_column_that_a_function_needs_and_no_record_has_is_an_error_before_the_run():
    paths = [f"{HERE}:{name}" for name in ("length", "answered", "keywords")]
    with Rewards(GrpoOptions(rewards=paths, reward_workers=1), tokenizer=None) as rewards:
        rewards.check_columns(["answer", "level"])  # the others are TRL's arguments
        with pytest.raises(ConfigError, match=f"{HERE}:answered needs answer; .* are level"):
            rewards.check_columns(["level"])


def test_a_module_of_the_current_folder_is_imported_and_one_that_trains_is_named(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [str(ROOT), *(x for x in sys.path if x not in ("", str(ROOT)))]
    )
    (tmp_path / "mine.py").write_text(
        "class Bonus:\n    def __call__(self, prompts):\n        return [1] * len(prompts)\n"
        "length = bonus = Bonus()\n"
    )
    paths = ["mine:length", "mine:bonus"]
    with Rewards(GrpoOptions(rewards=paths, reward_workers=1), tokenizer=None) as rewards:
        assert rewards.names == paths  # both are called Bonus
        assert rewards.score(rows_of(1), PROGRESS).values.tolist() == [[1, 1]] * 2
    (tmp_path / "trains.py").write_text(
        "from jaxspeed.rewards import reward_workers\n"
        "reward_workers.RewardWorkers(['trains:length'], 1, 1.0)\n"
    )
    with pytest.raises(ConfigError, match=r"ConfigError: .* trains when it is imported"):
        Rewards(GrpoOptions(rewards=["trains:length"], reward_workers=1), tokenizer=None)


# -- the end of the run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "matches"), (signal.SIGINT, "sleeps")]
)
def test_nothing_is_left_of_workers_whose_parent_ends(number, name, tmp_path):
    file = tmp_path / "processes"
    words = [sys.executable, "-m", "tests.rewards.waiting", name, str(file)]
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True) as parent:
        try:
            processes = processes_in(file)
            group = os.getpgid(processes[0])
            os.killpg(parent.pid, number)  # as a terminal does, to its group
            assert parent.wait(10) == (130 if number == signal.SIGINT else -number)
        finally:
            parent.kill()
    assert gone(*processes)
    every = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    assert gone(*(process for process in every if group_of(process) == group))


def test_a_reward_is_not_ended_by_a_schedulers_sigterm(workers, tmp_path):
    """But what it starts is ended by the reward's own."""
    (answer,) = ran(workers, "terminated")
    assert answer.get("values") == [1.0] * 3, answer


# -- parts of processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [1, 2])
def test_processes_have_contiguous_parts_of_the_groups(workers, count, batch, monkeypatch):
    rows, spans = rows_of(3, size=4), []
    rewards = rewards_of(workers, "length", reward_batch=batch)
    monkeypatch.setattr(scoring.jax, "process_count", lambda: count)
    for rank in range(count):
        monkeypatch.setattr(scoring.jax, "process_index", lambda rank=rank: rank)
        spans += rewards._spans(rows)
    assert [i for first, stop in spans for i in range(first, stop)] == [*range(12)]
    assert all(first % 4 == stop % 4 == 0 for first, stop in spans)
    if count > 1:
        assert len(spans) >= min(count, 3)
