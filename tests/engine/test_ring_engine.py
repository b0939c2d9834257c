"""What an engine tells of a run around rings: the check, the diagnosis, evaluation, its program."""

import jax
import numpy as np
import pytest

import jaxspeed
from tests.train.cases import CASES
from tests.train.parity import config

DROPOUT = CASES["dropout"]


def engine(stage=1, case=DROPOUT, accumulation=2, **parallel):
    batch = case.batches(accumulation)[0]
    sections = config(stage, accumulation, samples=len(jax.tree.leaves(batch)[0]))
    sections["optimizer"] = {"type": "SGD", "params": {"lr": 1e-2}}
    sections["parallel"] = {"data_reduction": "ring", **parallel}
    return jaxspeed.initialize(case.model, case.loss, sections), batch


@pytest.mark.full  # test_parity_ring.py has what each rank draws
@pytest.mark.parametrize("stage", [1, 3])
def test_the_check_draws_what_each_rank_drew(stage):
    run, batch = engine(stage)
    report = run.check(batch)
    assert report.ok, str(report)
    assert report.tolerance == 1e-4


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wire", "tolerance"), [("int8", 0.5), pytest.param("bf16", 5e-2, marks=pytest.mark.full)]
)
def test_the_check_allows_quantization_errors_and_shows_them(wire, tolerance):
    run, batch = engine(1, CASES["pair"], 1, ring_wire=wire)
    report = run.check(batch)
    assert report.ok and report.tolerance == tolerance
    assert 1e-4 < report.gradient < tolerance


def test_evaluation_is_the_same_as_without_rings():
    run, batch = engine(3, CASES["pair"], 1)
    by_xla, _ = engine(3, CASES["pair"], 1, data_reduction="xla")
    ours, theirs = run.eval_batch(batch), by_xla.eval_batch(batch)
    assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-6)


@pytest.mark.sampled
def test_a_diagnosis_finds_what_is_not_finite_in_a_ranks_part():
    run, batch = engine(1, CASES["pair"], 1)
    batch["x"][3] = np.nan
    assert "x" in str(run.diagnose(batch))


def test_the_report_of_the_compiled_step_has_its_permutes():
    run, batch = engine(1, CASES["pair"], 1)
    assert "collective-permute" in str(run.compiled(batch))


def test_one_device_trains_alone():
    case = CASES["pair"]
    batch = {name: x[:2] for name, x in case.batches(1)[0].items()}
    sections = {
        **config(2, samples=2),
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "parallel": {"data_reduction": "ring", "ring_wire": "int8"},
    }
    run = jaxspeed.initialize(case.model, case.loss, sections, devices=jax.devices()[:1])
    assert np.isfinite(float(run.train_batch(batch)["loss"]))
    assert run.state.ring_errors == {}, "nothing is sent, and nothing rounded"
