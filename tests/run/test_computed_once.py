"""What an objective computes once is of the model before step 0, and is never another's."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import models
from jaxspeed.data import computed_rows
from jaxspeed.data.computed_rows import RowStore
from jaxspeed.data.tokenizer import BPETokenizer
from jaxspeed.errors import ConfigError, RunError
from jaxspeed.run import check_run, evaluate_run, open_run, source_of, train
from tests.run import small

OBJECTIVE = {"type": "tests.objectives.anchored:Anchored", "reference": "precompute"}
STEPS, ROW, ENOUGH = 3, 16, 240


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of few steps, that reads some of the rows, in fp32."""
    sections = {"run": {"steps": STEPS, "checkpoint_every": 2}, "bf16": {"enabled": False}}
    path = small.write(folder, objective=OBJECTIVE, **sections)
    given = json.loads(path.read_text())
    for section, values in changes.items():
        given[section] = {**given.get(section, {}), **values}
    return given


def open_and_close(given):
    """Open a run, which computes the arrays, and wait for what it compiles meanwhile."""
    trainer = open_run(source_of(given))
    if trainer._evaluation_compiled is not None:
        trainer._evaluation_compiled()
    trainer.close()


def arrays(folder: Path, split: str = "train") -> dict[int, np.ndarray]:
    """The stored array of each row, read without the code under test."""
    store = folder / "computed" / "reference" / split
    count = json.loads((store / "done.json").read_text())
    ids = np.fromfile(store / "rows", np.int64)[:count]
    values = np.fromfile(store / "reference_logprobs", np.float32)
    return dict(zip(ids.tolist(), values[: count * ROW].reshape(count, ROW), strict=True))


def logprobs(given: dict[str, Any], rows: np.ndarray, values: Any = None) -> np.ndarray:
    """log p of tokens [batch, seq + 1] by the model of a seed, or of these parameters."""
    factory = models.build("gpt2", None, given["model"]["config"]).factory
    model = nnx.jit(lambda: factory(nnx.Rngs(given["run"].get("seed", 0))))()
    model.eval()
    log_p = jax.nn.log_softmax(model(rows[:, :-1]))
    return np.take_along_axis(np.asarray(log_p), rows[:, 1:, None], axis=-1)[..., 0]


def same(first: dict[int, np.ndarray], second: dict[int, np.ndarray]) -> bool:
    """Whether two stores have the same rows, bitwise."""
    return first.keys() == second.keys() and all(
        np.array_equal(x, second[row]) for row, x in first.items()
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has ended, and its config."""
    given = config(tmp_path_factory.mktemp("ended"))
    trainer = train(given)
    return given, trainer


def test_the_rows_that_the_run_reads_are_those_of_the_model_before_step_0(ended):
    given, trainer = ended
    stored = arrays(trainer.folder.path)
    visited = np.unique(trainer.corpus.train.sample_ids(0, STEPS * given["train_batch_size"]))
    assert sorted(stored) == visited.tolist() and len(visited) < trainer.corpus.train.samples
    rows = trainer.corpus.train.of(visited)
    expected = logprobs(given, rows["tokens"])
    np.testing.assert_allclose([stored[row] for row in visited], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rows["reference_logprobs"], [stored[row] for row in visited])
    held_out = arrays(trainer.folder.path, "held_out")
    assert len(held_out) == trainer.corpus.held_out.samples
    # The model has changed meanwhile, so that another one would differ.
    now = trainer.engine.logprobs({"tokens": rows["tokens"][:8]}).logprobs
    assert np.abs(now - expected[:8]).max() > 1e-3


def test_a_resumed_run_reads_them_and_computes_them_again_where_they_are_lost(ended, caplog):
    given, trainer = ended
    folder = trainer.folder.path
    before, held_out = arrays(folder), arrays(folder, "held_out")
    caplog.set_level("INFO", "jaxspeed")
    more = {**given, "run": {**given["run"], "steps": STEPS + 1}}
    open_and_close(more)
    assert same({row: x for row, x in arrays(folder).items() if row in before}, before)
    assert len(arrays(folder)) > len(before)
    shutil.rmtree(folder / "computed")
    open_and_close(given)
    assert same(arrays(folder), before) and same(arrays(folder, "held_out"), held_out)
    caplog.clear()
    open_and_close(given)
    (line, _) = [x.message for x in caplog.records if x.message.startswith("reference:")]
    assert f"reference_logprobs of {len(before)} samples are in" in line


def test_evaluation_and_check_compute_them_for_their_own_samples(ended):
    given, trainer = ended
    found = evaluate_run(source_of(given))
    assert found["eval_loss"] == pytest.approx(trainer.reached.eval_loss, rel=1e-6)
    assert check_run(source_of(given)).ok


@pytest.mark.sampled
def test_a_killed_pass_goes_on_bitwise(tmp_path):
    """Killed in the pass, with rows that were written and do not count."""
    given = config(tmp_path, run={"steps": 40, "checkpoint_every": 100})
    path = tmp_path / "config.json"
    whole = {**given, "run": {**given["run"], "output": str(tmp_path / "whole"), "steps": 40}}
    open_and_close(whole)
    path.write_text(json.dumps(given))
    store = tmp_path / "run" / "computed" / "reference" / "train"
    child = subprocess.Popen(
        small.command("train", path),
        env={**small.environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + ENOUGH
    while child.poll() is None and not ((store / "done.json").exists() and count(store)):
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    child.kill()
    _, said = child.communicate()
    assert child.returncode == -signal.SIGKILL, said
    done, every = count(store), len(arrays(tmp_path / "whole"))
    assert 0 < done < every
    for name in ("rows", "reference_logprobs"):  # half of a row
        with (store / name).open("ab") as file:
            file.write(b"\1\2\3")
    open_and_close(given)
    for split in ("train", "held_out"):
        assert same(arrays(tmp_path / "run", split), arrays(tmp_path / "whole", split))


def count(store: Path) -> int:
    return int(json.loads((store / "done.json").read_text()))


# -- keys ------------------------------------------------------------------------------------------

SHAPES = {"x": jax.ShapeDtypeStruct((2,), np.float32)}


def filled(folder: Path, key: dict[str, Any]) -> RowStore:
    store = RowStore(folder / "rows", 10)
    store.begin(key, SHAPES)
    writer = store.writer(2)
    writer.add(np.asarray([3, 1]), {"x": np.asarray([[3, 3], [1, 1]], np.float32)})
    writer.sync()
    writer.add(np.asarray([2]), {"x": np.asarray([[2, 2]], np.float32)})  # not counted
    writer.close()
    return store


def test_rows_count_once_they_are_on_the_disk(tmp_path):
    store = filled(tmp_path, {"data": 1})
    assert store.unused({"data": 1}) is None and store.ids.tolist() == [3, 1]
    writer = store.writer(1)
    writer.add(np.asarray([7]), {"x": np.asarray([[7, 8]], np.float32)})
    writer.sync()
    writer.close()
    rows = store.rows()
    np.testing.assert_array_equal(rows.read(np.asarray([1, 7, 3]))["x"], [[1, 1], [7, 8], [3, 3]])
    np.testing.assert_array_equal(rows.read(np.asarray([7]), slice(1, 2))["x"], [[8]])
    with pytest.raises(Exception, match="x of sample 2 are not computed"):
        rows.read(np.asarray([1, 2]))
    (store.folder / "x").write_bytes(b"")
    assert "damaged" in (store.unused({"data": 1}) or "")


def test_a_full_disk_is_one_error(tmp_path, monkeypatch):
    store = filled(tmp_path, {})
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(computed_rows.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(RunError, match=r"cannot be written: No space left on device; 160.*10 rows"):
        store.writer(10)


def rewritten(given: dict[str, Any], folder: Path) -> None:
    corpus = Path(given["data"]["path"])
    corpus.write_text(corpus.read_text()[::-1])


OTHERS = {
    "model": {"run": {"seed": 1}},
    "objective": {"objective": {"type": "tests.objectives.anchored:Renamed"}},
    "adapter": {"lora": {"r": 2, "target_modules": "all-linear"}},
    "precision": {"bf16": {"enabled": True}},
}


@pytest.mark.default_cases("precision", "held out")
@pytest.mark.parametrize("other", [*OTHERS, "tokens", "held out"])
def test_arrays_of_other_data_weights_or_settings_are_not_used(tmp_path, other):
    """A run in whose folder are those of another one computes its own again."""
    given = config(tmp_path, run={"steps": 1, "checkpoint_every": 100})
    apart = tmp_path / "apart.txt"
    if other == "held out":
        apart.write_text("aab bab " * 40)
        of_eval = {"held_out": 0.0, "eval": {"source": "text", "path": str(apart)}}
        given["data"] = {**given["data"], **of_eval}
    open_and_close(given)
    stale = tmp_path / "run" / "computed"
    if other == "tokens":
        rewritten(given, tmp_path)
    elif other == "held out":
        apart.write_text("bba aba " * 40)
    given |= {name: {**given.get(name, {}), **x} for name, x in OTHERS.get(other, {}).items()}
    run = tmp_path / "other"
    given["run"] = {**given["run"], "output": str(run)}
    open_and_close(given)
    expected = {split: arrays(run, split) for split in ("train", "held_out")}
    if other not in ("objective", "adapter"):  # the reference is the same there
        split = "held_out" if other == "held out" else "train"
        assert not same(arrays(tmp_path / "run", split), expected[split])
    keys = {split: key_of(run, split) for split in expected}
    shutil.rmtree(run / "computed")
    shutil.move(stale, run / "computed")
    assert keys != {split: key_of(run, split) for split in expected}
    open_and_close(given)
    assert keys == {split: key_of(run, split) for split in expected}
    assert all(same(arrays(run, split), x) for split, x in expected.items())


def key_of(folder: Path, split: str) -> Any:
    return json.loads((folder / "computed" / "reference" / split / "key.json").read_text())


@pytest.mark.sampled
def test_a_reference_with_another_tokenizer_is_refused_and_the_folder_stays_free(tmp_path):
    given = config(tmp_path)
    given["model"]["config"]["vocab_size"] = 300
    engine = jaxspeed.initialize(config={**given, "objective": {"type": "next_token"}})
    engine.save_pretrained(tmp_path / "other")
    trained = BPETokenizer.train(["some words, some more words"] * 9, 270)
    (tmp_path / "other" / "tokenizer.json").write_bytes(trained.to_bytes())
    named = {**OBJECTIVE, "reference_model": str(tmp_path / "other")}
    for command in (open_run, check_run):
        with pytest.raises(ConfigError, match=r"reference: .*other has another tokenizer than"):
            command(source_of({**given, "objective": named}))
    assert not (tmp_path / "run").exists()
    open_and_close(given)
