"""One run in this process: where it stops it goes on, and what it leaves."""

import contextlib
import io
import json
import re
import threading
from concurrent.futures import wait
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxspeed
from jaxspeed import models as families
from jaxspeed.errors import ModelError
from jaxspeed.generation.generate import TextPiece
from jaxspeed.metrics import NAMES, read_records, start_lines
from jaxspeed.run import FinalSample, open_run, show_ending, source_of, train
from jaxspeed.train_state import staged_init
from tests.run import small


def config(tmp_path, **changes):
    return json.loads(small.write(tmp_path, **changes).read_text())


@pytest.mark.full  # test_killed.py has it for a run that is killed, test_state_lost.py in a process
def test_a_run_in_two_parts_is_bitwise_the_run_in_one(tmp_path):
    given = config(tmp_path, run={"steps": 8})
    whole = given | {"run": given["run"] | {"output": str(tmp_path / "whole")}}
    train(whole)
    half = given | {"run": given["run"] | {"steps": 5}}  # no multiple of checkpoint_every
    train(half)
    trainer = open_run(source_of(given))
    assert trainer.reached.step == 5
    trainer.run()
    path = tmp_path / "config.json"
    small.assert_bitwise_equal(
        small.kept(path, tmp_path / "whole"), small.kept(path, tmp_path / "run")
    )


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    """A run of twenty steps, evaluated now and then, of which some checkpoints are retained."""
    changes = {"eval_every": 5, "checkpoint_every": 2, "keep": 2, "keep_every": 6}
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(printed):
        patched.setattr(start_lines, "LASTS", 0)
        trainer = train(config(tmp_path_factory.mktemp("twenty"), run=changes))
    trainer.printed = printed.getvalue()
    return trainer


def test_a_call_in_python_names_the_phases_of_its_start(twenty):
    phases = re.findall(r"^([a-z][A-Za-z, ]+): \d+\.\d s$", twenty.printed, re.M)
    assert phases[0] == "reading the data" and phases[-1] == "compiling the step"
    assert {"building the model", "tracing the loss", "initializing weights"} <= {*phases}
    assert phases.count("compiling the step") == 1


def test_every_step_has_a_record_with_stable_names(twenty):
    trainer = twenty
    records = read_records(trainer.folder.metrics)
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 21))
    assert [r["step"] for r in records if "eval_loss" in r] == [5, 10, 15, 20]
    assert {name for r in records for name in r} <= NAMES.keys()
    promised = {"loss", "lr", "grad_norm", "grad_norm_clipped", "skipped_steps", "tokens"}
    promised |= {"tokens_per_second", "model_flops_per_second", "mfu", "mfu_formula"}
    promised |= {"step_seconds", "data_seconds", "compile_seconds"}
    step = next(r for r in reversed(records) if "loss" in r)
    assert promised <= step.keys()
    assert step["tokens"] == 20 * 16 * 16
    ledger = {name: x for name, x in records[-1].items() if name.startswith("wall/")}
    total = ledger.pop("wall/total")
    assert sum(ledger.values()) == pytest.approx(total)


def test_the_held_out_loss_is_the_mean_over_all_targets(twenty):
    trainer = twenty
    held_out, model = trainer.corpus.held_out, trainer.engine.module
    forward = jax.jit(lambda tokens, segments: model(tokens, segment_ids=segments))
    total = weight = 0.0
    for batch in held_out.once(1):  # one sample at a time, in plain JAX
        tokens, segments = batch["tokens"], batch["segment_ids"]
        logits = np.asarray(forward(tokens[:, :-1], segments[:, :-1]), np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        picked = np.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
        counts = segments[:, 1:] == segments[:, :-1]
        if "mask" in batch:
            counts &= batch["mask"][:, -counts.shape[1] :] != 0
        total -= picked[counts].sum()
        weight += counts.sum()
    assert trainer.reached.eval_loss == pytest.approx(total / weight, rel=5e-3)  # bf16 against fp32


@pytest.mark.sampled
def test_a_loss_that_stays_infinite_ends_the_run_with_the_diagnosis(tmp_path):
    def broken(model, batch):
        return jnp.sum(model(batch["tokens"][:, :-1])) * jnp.inf, jnp.ones(())

    data = {"seq_len": 16, "held_out": 0.0}
    given = config(tmp_path, run={"max_skipped": 3}, data=data, zero_optimization={"stage": 0}) | {
        "gradient_accumulation_steps": 1
    }
    source = source_of(given)
    built = families.build("gpt2", None, given.pop("model")["config"] | {"dropout": 0.0})
    trainer = open_run(source_of(given, built.factory, broken))
    assert source.folder.path == trainer.folder.path
    with pytest.raises(jaxspeed.RunError, match="3 steps in a row") as caught:
        trainer.run()
    assert "gradients are not finite" in str(caught.value)


def test_a_folder_with_another_run_is_refused_with_the_difference(tmp_path):
    given = config(tmp_path, run={"steps": 2})
    train(given).folder.close()
    with pytest.raises(jaxspeed.ConfigError, match="holds another run") as caught:
        train(given | {"train_batch_size": 32})
    assert "train_batch_size: 16 there, 32 here" in str(caught.value)


def test_a_folder_in_use_is_refused(tmp_path):
    given = config(tmp_path)
    first = open_run(source_of(given))
    with pytest.raises(jaxspeed.ConfigError, match="in use by another run"):
        open_run(source_of(given))
    first.folder.close()


def test_a_folder_with_other_files_is_refused(tmp_path):
    given = config(tmp_path)
    Path(given["run"]["output"]).mkdir()
    (Path(given["run"]["output"]) / "thesis.tex").write_text("years of work")
    with pytest.raises(jaxspeed.ConfigError, match=r"thesis\.tex"):
        open_run(source_of(given))


def test_a_run_without_a_number_of_steps_is_refused(tmp_path):
    given = config(tmp_path)
    del given["run"]["steps"]
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.steps"):
        open_run(source_of(given))


def test_the_newest_checkpoints_and_the_multiples_are_kept(twenty):
    steps = [info.step for info in twenty.checkpointer.list()]
    assert steps == [6, 12, 18, 20]


def test_a_run_that_is_done_does_nothing_more(tmp_path, capsys):
    given = config(tmp_path, run={"steps": 3})
    train(given).folder.close()
    records = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    written = (tmp_path / "run" / "checkpoints" / "step-00000003").stat().st_mtime_ns
    assert capsys.readouterr().out
    train(given, quiet=True).folder.close()
    assert not capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == records
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").stat().st_mtime_ns == written


# A profiler that is on slows down what is traced: 9 steps end with the run, after its evaluation.
@pytest.mark.sampled
@pytest.mark.parametrize("steps", [1, pytest.param(9, marks=pytest.mark.full)])
def test_a_trace_is_written_of_the_steps_that_were_asked_for(tmp_path, steps):
    trainer = train(config(tmp_path, run={"steps": 3, "profile_step": 2, "profile_steps": steps}))
    assert list(trainer.folder.profile.rglob("*.xplane.pb"))


@pytest.mark.sampled
def test_a_run_may_begin_with_the_weights_of_another(tmp_path):
    given = config(tmp_path, run={"steps": 2})
    first = train(given)
    kept = {path: np.asarray(x) for path, x in first.engine.parameters.items()}
    first.folder.close()
    run = given["run"] | {"output": str(tmp_path / "second"), "init_from": str(tmp_path / "run")}
    second = open_run(source_of(given | {"run": run, "zero_optimization": {"stage": 1}}))
    assert second.reached.step == int(second.engine.state.step) == 0
    for path, x in second.engine.parameters.items():
        np.testing.assert_array_equal(x, kept[path])
    second.folder.close()
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.init_from: .* holds no checkpoint"):
        empty = {"output": str(tmp_path / "third"), "init_from": str(tmp_path)}
        open_run(source_of(given | {"run": run | empty}))


@pytest.fixture
def evaluation_compiled():
    """The kinds of the threads that compiled evaluation so far."""
    # What the test before left to compile is not counted: every thread comes to the barrier.
    threads = staged_init._THREADS
    everyone = threading.Barrier(threads._max_workers)
    wait([threads.submit(everyone.wait) for _ in range(threads._max_workers)])
    found = []

    def heard(event, _, **about):
        if event.endswith("backend_compile_duration") and "evaluate" in about.get("fun_name", ""):
            found.append(threading.current_thread().name.split("_")[0])

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


def test_evaluation_compiles_once_in_the_background_of_the_step(tmp_path, evaluation_compiled):
    trainer = train(config(tmp_path, run={"steps": 2, "eval_every": 1}))
    assert trainer.reached.eval_step == 2
    assert evaluation_compiled == ["jaxspeed-compile"]


def with_sample(given):
    """A run that shows a sample of text at its end."""
    trainer = open_run(source_of(given))
    trainer.sample = FinalSample(trainer.engine, trainer.corpus)
    return trainer


def test_what_fails_while_it_compiles_in_the_background_fails_as_it_does_without(tmp_path):
    """A sample of text is not worth a run, and evaluation raises its error when it is called."""
    trainer = with_sample(config(tmp_path, run={"steps": 1, "sample_tokens": 8}))
    trainer._evaluation_compiled = lambda: ValueError("compilation")
    trainer.engine.stream = lambda *given, **options: 1 / 0
    assert trainer.run().eval_loss is not None
    trainer.close()


def test_the_sample_that_the_last_evaluation_started_is_the_one_shown(tmp_path):
    trainer = with_sample(config(tmp_path, run={"steps": 1, "sample_tokens": 8}))
    asked, stream = [], trainer.engine.stream
    trainer.engine.stream = lambda *given, **options: (
        asked.append(trainer.reached.eval_step),
        stream(*given, **options),
    )[1]
    trainer.run()
    found = show_ending(Console(quiet=True), trainer, again="")
    trainer.close()
    assert found["sample"]
    assert asked == [None]  # once, when no evaluation had ended


def test_the_sample_is_drawn_while_the_last_checkpoint_is_written(tmp_path):
    trainer = with_sample(config(tmp_path, run={"steps": 1, "sample_tokens": 8}))
    calls, wait, draw = [], trainer.checkpointer.wait, trainer.sample.draw
    trainer.checkpointer.wait = lambda: (calls.append("wait"), wait())[1]
    trainer.sample.draw = lambda: (calls.append("draw"), draw())[1]
    trainer.run()
    assert calls[-2:] == ["draw", "wait"] and trainer._saved == 1
    trainer.engine.stream = lambda *given, **options: 1 / 0  # it is drawn already
    assert show_ending(Console(quiet=True), trainer, again="")["sample"] != ""
    trainer.close()


def test_a_run_that_is_asked_to_stop_draws_no_sample(tmp_path):
    trainer = with_sample(config(tmp_path, run={"steps": 1, "sample_tokens": 8}))
    trainer.sample.draw = lambda: 1 / 0
    trainer.stopped_by = "SIGTERM"
    trainer.run()
    assert show_ending(Console(quiet=True), trainer, again="")["sample"] is None
    trainer.close()


def test_an_error_while_the_last_checkpoint_is_written_does_not_lose_it(tmp_path):
    trainer = with_sample(config(tmp_path, run={"steps": 1}))
    trainer.sample.draw = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert trainer.checkpointer.latest() == "step-00000001"
    trainer.close()


def test_a_sample_that_fails_is_tried_again_for_its_warning(tmp_path, caplog):
    trainer = with_sample(config(tmp_path, run={"steps": 1, "sample_tokens": 8}))
    asked = []

    def fails(*given, **options):
        asked.append(given)
        yield TextPiece(0, "half a te", 1)
        raise ModelError("the model has another signature")

    trainer.engine.stream = fails
    trainer.sample.start()
    trainer.sample.draw()
    assert len(asked) == 1 and not caplog.records
    assert show_ending(Console(quiet=True), trainer, again="")["sample"] is None
    assert len(asked) == 2 and "no sample of text: the model has another" in caplog.text
    trainer.close()


@pytest.mark.sampled
@pytest.mark.parametrize("held_out", [0.05, 0.0])
def test_what_is_compiled_with_the_first_step_is_not_compiled_for_the_last(held_out, tmp_path):
    """And the sample is that of a run without it: of the last state, not of the first."""
    samples, optimizer = [], {"type": "AdamW", "params": {"lr": 0.1}}
    for output in ("plain", "warm"):
        run = {"steps": 2, "sample_tokens": 8, "output": str(tmp_path / output)}
        given = config(tmp_path, run=run, data={"held_out": held_out}, optimizer=optimizer)
        trainer = with_sample(given)
        if output == "warm":
            trainer.sample.compile()
            programs = dict(trainer.engine._generator._programs)
        trainer.run()
        samples.append(show_ending(Console(quiet=True), trainer, again="")["sample"])
        trainer.close()
    assert trainer.engine._generator._programs == programs
    assert samples[0] == samples[1] != ""


@pytest.mark.sampled
def test_any_loss_is_evaluated_on_samples_as_they_are(tmp_path, evaluation_compiled):
    """A mean that knows no marks: the last batch is smaller, and weighs as much less."""
    given = config(tmp_path, run={"steps": 1})
    built = families.build("gpt2", None, given.pop("model")["config"])

    def mean_loss(model, batch):
        total, weight = built.loss(model, {"tokens": batch["tokens"]})
        return total / weight

    given |= {"train_batch_size": 24, "gradient_accumulation_steps": 1}
    given["data"]["seq_len"] = 16
    trainer = train(given, built.factory, mean_loss)
    held_out, model = trainer.corpus.held_out, trainer.engine.module
    shared = held_out.samples // 8 * 8
    assert shared % 24
    loss = jax.jit(lambda batch: mean_loss(model, batch))
    losses = [float(loss(held_out.slice(i, 1))) for i in range(shared)]
    assert trainer.reached.eval_loss == pytest.approx(np.mean(losses), rel=5e-3)
    assert evaluation_compiled == ["jaxspeed-compile", "MainThread"]  # the last batch is smaller
