"""One of several processes: `python -m tests.checkpoint.processes FOLDER PORT RANK COUNT`."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxspeed
from jaxspeed.checkpoint import Checkpointer
from jaxspeed.interop import HFForm, MappingTable, TensorRule
from jaxspeed.interop.safetensors import TensorFile
from jaxspeed.placement.codec import unpad
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.train_state.state import updated_values
from jaxspeed.user_models.rng import is_key
from tests.checkpoint import states
from tests.engine import tiny


def gathered(engine: Any) -> dict[str, np.ndarray]:
    """As states.held, for arrays that are sharded over processes."""
    state, program = engine.state, engine.program
    shapes = {path: place[0] for path, place in program.layout.places.items()}
    whole = {
        **{f"param {r.path}": (updated_values(state, r), r.leaf.shape) for r in program.table},
        **{f"opt {k}": (v, shapes[k]) for k, v in flat_with_paths(state.opt).items()},
        **{f"variable {k}": (v, v.shape) for k, v in state.variables.items()},
        **{f"scale {k}": (v, ()) for k, v in state.loss_scale._asdict().items()},
        "step": (state.step, ()),
        "skipped": (state.skipped, ()),
    }
    assert not any(is_key(x) for x, _ in whole.values())
    return {
        name: np.asarray(unpad(multihost_utils.process_allgather(x, tiled=True), shape))
        for name, (x, shape) in whole.items()
    }


def steps(engine: Any, first: int, count: int) -> None:
    for i in range(first, first + count):
        batch = tiny.batch(states.SAMPLES, seed=i)
        at = engine.program.batch_shardings(batch)
        placed = {
            k: jax.make_array_from_callback(v.shape, at[k], lambda rows, v=v: v[rows])
            for k, v in batch.items()
        }
        float(engine.train_batch(placed)["loss"])


def restore_train_save(folder: Path) -> None:
    engine = states.engine(stage=3)
    assert len(jax.devices()) == 8 and jax.local_device_count() == 4
    assert engine.load_checkpoint(folder)[1] == {"from": 1}
    with np.load(folder / "at-the-save.npz") as file:
        states.assert_same(gathered(engine), dict(file))
    print("same")
    steps(engine, 3, 5)
    engine.save_checkpoint(folder, "two", {"from": 2})
    after = gathered(engine)
    engine.close()
    np.savez(folder / f"after-{jax.process_index()}.npz", **after)


def save_in_bucket(folder: Path) -> None:
    """Of both processes, and restored by both."""
    engine = states.engine(stage=3)
    engine.load_checkpoint(folder, "two")
    saver = Checkpointer(os.environ["TEST_BUCKET"])
    saver.save(engine.program, engine.state, tag="two")
    saver.wait()
    expected = gathered(engine)
    engine.load_checkpoint(folder, next(info.tag for info in Checkpointer(folder).list()))
    engine.state = saver.restore(engine.program).state
    states.assert_same(gathered(engine), expected)
    engine.close()
    print("same in the bucket")


def damaged(folder: Path) -> None:
    engine = states.engine(stage=3)
    saver = Checkpointer(folder)
    for tag in ("a", "b"):
        saver.save(engine.program, engine.state, tag=tag)
    saver.wait()
    if jax.process_index() == 0:
        file = next((folder / "b" / "arrays" / "ocdbt.process_1" / "d").iterdir())
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    multihost_utils.sync_global_devices("damaged")
    assert saver.restore(engine.program).tag == "a"
    try:
        saver.restore(engine.program, tag="b")
    except jaxspeed.CheckpointError as error:
        assert "is damaged" in str(error)
    else:
        raise AssertionError("a damaged checkpoint was taken")
    print("took the one before the damaged one")


def disagree(folder: Path) -> None:
    engine = states.engine(stage=3)
    saver = Checkpointer(folder)
    finish = saver._files.finish

    def fail() -> None:
        finish()
        raise OSError("injected")

    try:
        saver.save(engine.program, engine.state, tag=f"tag-{jax.process_index()}")
    except jaxspeed.CheckpointError as error:
        print(error)
    if jax.process_index() == 1:
        saver._files.finish = fail  # type: ignore[method-assign]
    saver.save(engine.program, engine.state, tag="same")
    try:
        saver.wait()
    except jaxspeed.CheckpointError as error:
        print(error)
    multihost_utils.sync_global_devices("cleared")
    assert saver.list() == []


def fail_to_write(folder: Path) -> None:
    """The first process alone writes what all gather."""
    engine = states.engine(stage=3, lora={"r": 2})
    table = MappingTable([TensorRule(path.replace("/", "."), path) for path in PLAIN])

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for method in ("create", "array", "finish"):
        if jax.process_index() == 0:
            intact = getattr(TensorFile, method)
            setattr(TensorFile, method, no_space)
        for what, write in {
            "adapter": lambda folder: engine.save_adapter(folder),
            "merged": lambda folder: engine.save_pretrained(folder, form=HFForm(table), merge=True),
        }.items():
            try:
                write(folder / f"{what}-{method}")
            except jaxspeed.CheckpointError as error:
                print(f"{what} {method}: {error}")
        if jax.process_index() == 0:
            setattr(TensorFile, method, intact)
    multihost_utils.sync_global_devices("written")


PLAIN = [f"{layer}/{name}" for layer in ("wide", "narrow", "head") for name in ("kernel", "bias")]

if __name__ == "__main__":
    folder, port, rank, count = sys.argv[1:]
    logging.basicConfig()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", int(count), int(rank))
    restore_train_save(Path(folder))
    save_in_bucket(Path(folder))
    damaged(Path(f"{folder}-damaged"))
    disagree(Path(f"{folder}-disagree"))
    fail_to_write(Path(f"{folder}-written"))
