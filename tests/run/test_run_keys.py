"""What each key of the section `run` changes of a run, with a model that compiles in a second."""

import shutil
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxspeed
from jaxspeed.checkpoint import checkpointer
from jaxspeed.config import load_config
from jaxspeed.engine import Engine
from jaxspeed.generation import TextPiece
from jaxspeed.metrics import read_records
from jaxspeed.run import open_run, sampling, show_ending, source_of, train, trainer
from tests.engine import tiny
from tests.engine.tiny import PAIR, squared_error
from tests.interop import torch_files

STEPS = 12


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A run without an output writes into the current folder."""
    monkeypatch.chdir(tmp_path)


def samples():
    """One sample after another of the model's own."""
    every = tiny.batch(64)
    return [{name: x[i] for name, x in every.items()} for i in range(64)]


def config(folder: Path, **run):
    data = {"source": "tests.run.test_run_keys:samples", "samples": 64, "held_out": 0.25}
    own = {"output": str(folder / "run"), "steps": STEPS, "sample_tokens": 0}
    return tiny.config(data=data, run=own | run)


def trained(folder: Path, loss_fn=squared_error, **run):
    return train(config(folder, **run), PAIR, loss_fn)


def test_steps_evaluations_and_checkpoints_are_those_that_are_asked_for(tmp_path, monkeypatch):
    evaluated = []
    real = Engine.eval_totals
    monkeypatch.setattr(
        Engine, "eval_totals", lambda *given, **more: evaluated.append(1) or real(*given, **more)
    )
    run = trained(
        tmp_path,
        seed=5,
        eval_every=5,
        eval_batches=1,
        checkpoints=str(tmp_path / "elsewhere"),
        checkpoint_every=2,
        keep=2,
        keep_every=3,
    )
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in records if "eval_loss" in r] == [5, 10, 12]
    assert len(evaluated) == 3  # of the two batches that are held out
    kept = sorted(int(path.name[-8:]) for path in (tmp_path / "elsewhere").glob("step-*"))
    assert kept == [info.step for info in run.checkpointer.list()] == [6, 10, 12]


def test_scores_of_tasks_are_in_the_metrics_of_each_evaluation(tmp_path, monkeypatch):
    asked = []

    def scores(engine, tokenizer, tasks, *more):
        asked.append(tasks)
        return {"arc/acc": 0.5, "arc/acc_stderr": 0.125}

    monkeypatch.setattr(trainer, "evaluate_tasks", scores)
    monkeypatch.setitem(sys.modules, "lm_eval", module := ModuleType("lm_eval"))
    module.__spec__ = ModuleSpec("lm_eval", None, origin="here")
    trained(tmp_path, steps=3, eval_every=2, eval_tasks=["arc"])
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    written = {r["step"]: r["eval_arc/acc"] for r in records if "eval_arc/acc" in r}
    assert written == {2: 0.5, 3: 0.5} and asked == [["arc"], ["arc"]]
    assert all("eval_loss" in r for r in records if "eval_arc/acc_stderr" in r)


def test_a_run_with_tasks_needs_lm_eval_and_their_files(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", module := ModuleType("lm_eval"))
    module.__spec__ = ModuleSpec("lm_eval", None, origin="here")
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.eval_tasks: no\.yaml: no such file"):
        trained(tmp_path, eval_tasks=["no.yaml"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.eval_tasks: needs lm_eval, .*\[eval\]"):
        trained(tmp_path, eval_tasks=["arc"])


def test_epochs_are_passes_over_the_training_samples_and_schedules_follow_them(tmp_path):
    """32 samples a step, 48 of 64 for training: 3.9 epochs are 5.85 steps, thus 6."""
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    schedule["params"] |= {"warmup_num_steps": 2, "warmup_max_lr": 0.1, "warmup_type": "linear"}

    def rates(folder, **length):
        written = config(tmp_path / folder, **{"steps": None, **length}) | {"scheduler": schedule}
        written["train_batch_size"] = 32
        train(written, PAIR, squared_error)
        records = read_records(tmp_path / folder / "run" / "metrics.jsonl")
        return [(r["step"], r["lr"]) for r in records if "lr" in r]

    assert rates("a", epochs=3.9) == rates("b", steps=6)
    longer = load_config(tmp_path / "a" / "run", ["run.steps=8"])  # the override replaces epochs
    assert train(longer, PAIR, squared_error).reached.step == 8


def test_the_length_of_a_run_is_in_steps_or_in_epochs(tmp_path):
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.epochs: .*Remove one"):
        load_config(config(tmp_path, epochs=1))
    unknown = config(tmp_path, epochs=1, steps=None)
    unknown["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    with pytest.raises(jaxspeed.ConfigError, match=r'"auto" with run\.epochs.*set run\.steps'):
        jaxspeed.initialize(PAIR, squared_error, unknown)


def test_a_loss_that_cannot_be_traced_is_reported_before_anything_is_compiled(tmp_path):
    compiled = []

    def note(name, seconds, **about):
        here = threading.current_thread() is threading.main_thread()  # others: of earlier runs
        if here and name == "/jax/core/compile/backend_compile_duration":
            compiled.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with pytest.raises(jaxspeed.ModelError, match=r"call jax\.numpy"):
            trained(tmp_path, lambda model, batch: np.square(model(batch["x"])).mean())
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == []


def test_the_weights_begin_at_the_seed_or_where_another_run_ended(tmp_path):
    first = open_run(source_of(config(tmp_path, seed=5, steps=2), PAIR, squared_error))
    start = PAIR[0](jax.random.key(5))
    weight = first.engine.parameters["layers/1/w"]
    np.testing.assert_allclose(weight, start["layers"][1]["w"], rtol=2**-20)
    first.run()
    first.close()
    ended = np.asarray(first.engine.parameters["layers/1/w"])
    again = config(tmp_path / "second", init_from=str(tmp_path / "run"))
    second = open_run(source_of(again, PAIR, squared_error))
    np.testing.assert_array_equal(second.engine.parameters["layers/1/w"], ended)
    assert second.reached.step == 0
    second.close()


def test_a_run_of_deepspeed_goes_on_by_the_table_of_a_file(tmp_path):
    names = [*(f"layers.{i}.w" for i in range(3)), "out"]
    draw = np.random.default_rng(0)
    shapes = {name: (8, 8) if name != "out" else (8, 1) for name in names}
    values = {"": {name: draw.random(shape, np.float32) for name, shape in shapes.items()}}
    there = torch_files.deepspeed(tmp_path / "theirs", 2, values)
    (tmp_path / "map.py").write_text(
        "from jaxspeed.interop import MappingTable, TensorRule\n"
        "table = lambda sizes: MappingTable([\n"
        "    TensorRule('layers.{i}.w', 'layers/{i}/w'), TensorRule('out', 'out')])\n"
    )
    imports = {"folder": str(there), "map": str(tmp_path / "absent.py")}
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.import_from\.map"):
        open_run(source_of(config(tmp_path, import_from=imports, seed=5), PAIR, squared_error))
    assert not (tmp_path / "run").exists()  # another seed would be refused there
    imports["map"] = str(tmp_path / "map.py")
    run = open_run(source_of(config(tmp_path, import_from=imports), PAIR, squared_error))
    assert run.reached.step == 7
    weight = run.engine.parameters["layers/1/w"]
    np.testing.assert_array_equal(weight, values[""]["layers.1.w"])
    run.run()
    run.close()
    again = open_run(source_of(config(tmp_path, import_from=imports), PAIR, squared_error))
    assert again.reached.step == STEPS
    again.close()
    both = config(tmp_path / "b", import_from=imports, init_from=str(tmp_path / "run"))
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.import_from: not with run\.init_from"):
        open_run(source_of(both, PAIR, squared_error))


def test_runs_that_share_a_checkpoint_folder_are_one_run_or_refused(tmp_path):
    shared = {"checkpoints": str(tmp_path / "shared"), "steps": 2, "seed": 5}
    first = trained(tmp_path / "a", **shared)
    saved = [(info.tag, info.time) for info in first.checkpointer.list()]
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.checkpoints: .* another run") as caught:
        trained(tmp_path / "b", **shared | {"seed": 6, "checkpoint_every": 1})
    assert "seed: 5 there, 6 here" in str(caught.value)
    assert [(info.tag, info.time) for info in first.checkpointer.list()] == saved
    third = open_run(source_of(config(tmp_path / "c", **shared), PAIR, squared_error))
    assert third.reached.step == 2
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.checkpoints: .* in use by another run"):
        open_run(source_of(config(tmp_path / "d", **shared), PAIR, squared_error))
    third.close()


def test_a_run_ends_after_so_many_skipped_steps(tmp_path):
    def broken(model, batch):
        return jnp.sum(model(batch["x"])) * jnp.inf, jnp.ones(())

    with pytest.raises(jaxspeed.RunError, match="not finite in 3 steps"):
        trained(tmp_path, broken, max_skipped=3)


def test_the_steps_that_are_named_are_traced(tmp_path, monkeypatch):
    during = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: during.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: during.append("stop"))
    real = Engine.train_batch
    monkeypatch.setattr(
        Engine, "train_batch", lambda self, batch: during.append("step") or real(self, batch)
    )
    trained(tmp_path, steps=6, profile_step=2, profile_steps=2)
    assert during == ["step", "start", "step", "step", "stop", "step", "step", "step"]


def test_batches_are_read_ahead_as_far_as_is_asked_for(tmp_path):
    given = config(tmp_path)
    given["data"]["prefetch"] = 5
    run = open_run(source_of(given, PAIR, squared_error))
    feeder = run._feeder()
    try:
        with feeder._changed:
            assert feeder._changed.wait_for(lambda: len(feeder._ready) == 5, timeout=5)
    finally:
        feeder.close()
        run.close()


def test_a_run_starts_the_devices_that_it_names(tmp_path):
    with pytest.raises(jaxspeed.JaxspeedError, match=r"simulate\(3\): JAX has already started"):
        source_of(config(tmp_path, devices="cpu:3"), PAIR, squared_error)


def test_text_is_sampled_as_the_keys_say():
    asked = {}

    def stream(prompts, tokens, *, temperature, **options):
        asked.update(prompts=prompts, tokens=tokens, temperature=temperature)
        return iter([TextPiece(0, " upon", 1)])

    model = {"family": "gpt2", "preset": "tiny"}
    run = {"sample_prompt": "Once", "sample_tokens": 7, "sample_temperature": 0.25}
    given = jaxspeed.Config(**tiny.config(model=model, run=run, data={"source": "synthetic"}))
    engine = SimpleNamespace(config=given, stream=stream)
    texts = sampling.sample_texts(engine, jaxspeed.data.ByteTokenizer())
    assert "".join(text for _, text in texts) == "Once upon"
    assert asked == {"prompts": ["Once"], "tokens": 7, "temperature": 0.25}


# -- a folder that is removed in mid-run -----------------------------------------------------------


def test_a_folder_removed_in_a_step_ends_the_run_in_one_error(tmp_path, monkeypatch, caplog):
    run = open_run(source_of(config(tmp_path, checkpoint_every=4), PAIR, squared_error))
    real = run.engine.train_batch

    def step(batch):
        if run.reached.step == 5:
            run.checkpointer.wait()
            shutil.rmtree(tmp_path / "run")
        return real(batch)

    monkeypatch.setattr(run.engine, "train_batch", step)
    with pytest.raises(jaxspeed.RunError, match=r"run was removed while the run used it"):
        run.run()
    run.close()
    assert run.reached.step == 6  # the step in which it was removed is the last
    assert not (tmp_path / "run").exists() and not caplog.records


def test_a_folder_removed_during_a_save_ends_the_run_in_one_error(tmp_path, monkeypatch, caplog):
    run = open_run(source_of(config(tmp_path, checkpoint_every=4), PAIR, squared_error))
    real = checkpointer._describe

    def describe(*given):
        shutil.rmtree(tmp_path / "run")
        real(*given)

    monkeypatch.setattr(checkpointer, "_describe", describe)
    with pytest.raises(jaxspeed.RunError, match=r"run was removed while the run used it"):
        run.run()
    run.close()
    assert not (tmp_path / "run").exists() and not caplog.records


def test_a_folder_removed_after_the_last_save_ends_in_one_error(tmp_path):
    run = trained(tmp_path)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(jaxspeed.RunError, match=r"metrics.jsonl cannot be read: No such file"):
        show_ending(Console(quiet=True), run, "again")
