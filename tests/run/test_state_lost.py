"""An engine whose state is lost on the way: the run does again what was lost, and nothing twice."""

import json

import pytest

from jaxspeed.errors import StateLostError
from jaxspeed.metrics import read_records
from jaxspeed.run import open_run, source_of, train
from jaxspeed.run.trainer import LOSSES_IN_A_ROW
from tests.run import small


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(the config's path, the output of a run of it that lost nothing)."""
    folder = tmp_path_factory.mktemp("whole")
    # Evaluations read what is pending, so that there are records of steps that are lost.
    changes = {"steps": 8, "checkpoint_every": 3, "eval_every": 2, "eval_batches": 1}
    path = small.write(folder, run=changes)
    train(json.loads(path.read_text())).folder.close()
    return path, folder / "run"


@pytest.fixture
def config(whole, tmp_path):
    given = json.loads(whole[0].read_text())
    return given | {"run": given["run"] | {"output": str(tmp_path / "run")}}


def lossy(trainer, lost_at):
    """The state is lost in these calls, counted from 1: what is held is overwritten before."""
    engine, calls = trainer.engine, iter(range(1, 1000))
    train_batch = engine.train_batch

    def call(batch):
        metrics = train_batch(batch)
        if next(calls) in lost_at:
            raise StateLostError("a server died")
        return metrics

    engine.train_batch = call
    return trainer


@pytest.mark.sampled
@pytest.mark.parametrize(
    "lost_at",
    [
        pytest.param({5}, marks=pytest.mark.full),
        pytest.param({2}, marks=pytest.mark.full),
        {2, 7, 8, 11},  # before any save; then later, in a row, and once more
    ],
    ids=["later", "before any save", "often"],
)
def test_a_run_ends_bitwise_as_one_that_lost_nothing(config, whole, tmp_path, lost_at):
    trainer = lossy(open_run(source_of(config)), lost_at)
    assert trainer.run().step == 8
    trainer.close()
    path, output = whole
    small.assert_bitwise_equal(small.kept(path, output), small.kept(path, tmp_path / "run"))
    never, ours = (
        [(r["step"], r["loss"]) for r in read_records(run / "metrics.jsonl") if "loss" in r]
        for run in (output, tmp_path / "run")
    )
    assert ours == never


def test_a_state_that_is_lost_again_and_again_at_one_step_ends_the_run(config):
    trainer = lossy(open_run(source_of(config)), set(range(1, 1000)))
    calls = trainer.engine.train_batch
    count = 0

    def counted(batch):
        nonlocal count
        count += 1
        return calls(batch)

    trainer.engine.train_batch = counted
    with pytest.raises(StateLostError):
        trainer.run()
    trainer.close()
    assert count == LOSSES_IN_A_ROW + 1
