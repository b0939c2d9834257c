"""What the loader gives a mesh with an axis of sequences."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspeed.config import Config
from jaxspeed.data import known_shapes, limits_of
from jaxspeed.data.samples import with_targets
from jaxspeed.data.split import Split
from jaxspeed.errors import BatchError
from jaxspeed.objectives import without_weight
from jaxspeed.ops.next_tokens import IGNORED, split_batch
from jaxspeed.placement.batch_dims import batch_specs, check_sequence_dims, sequence_dims
from tests.data.corpora import opened
from tests.data.test_processes import free_port
from tests.sequence.feeding_process import BATCH, STEPS, Numbered
from tests.support.covering import covering

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"data": 2, "seq": 4}


@pytest.mark.parametrize(
    "arrays", ["", "segment_ids", "segment_ids mask", "segment_ids positions mask"]
)
def test_inputs_and_targets_are_those_of_the_loss(arrays):
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 50, (3, 17)).astype(np.int32)}
    made = {
        "segment_ids": np.cumsum(rng.random((3, 17)) < 0.3, 1),
        "positions": rng.integers(0, 17, (3, 17)),
        "mask": rng.integers(0, 2, (3, 17)),
    }
    batch |= {name: made[name].astype(np.int32) for name in arrays.split()}
    for each in (batch, without_weight(batch, np.array([False, True, False]))):
        cut = with_targets(each)
        assert {x.shape for x in cut.values()} == {(3, 16)}
        for ours, theirs in zip(split_batch(cut), split_batch(each), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                np.testing.assert_array_equal(ours, theirs)
    assert (np.asarray(split_batch(cut).targets)[1] == IGNORED).all()


def test_the_order_of_samples_and_the_corpus_are_the_same_with_targets():
    data = {"source": "synthetic", "samples": 200, "document_masks": True}
    one, two = opened(data), opened(data, targets=True)
    assert one.fingerprint == two.fingerprint
    for step in range(3):
        cut, tokens = two.train.batch(step, 8), one.train.batch(step, 8)["tokens"]
        np.testing.assert_array_equal(cut["tokens"], tokens[:, :-1])
        assert {x.shape for x in cut.values()} == {(8, 16)}
    for batch in (two.held_out.padded(0, 4), two.held_out.copies(0, 4), two.held_out.slice(0, 4)):
        assert {x.shape for x in batch.values()} == {(4, 16)}
    shapes = two.train.shapes(8)
    sizes = type("Sizes", (), {"vocab_size": 512, "max_position_embeddings": 16})
    assert shapes == known_shapes(Config(data=data).data, limits_of(sizes, targets=True), 8)


def shapes(**arrays):
    return {
        name.replace("_in_", "/"): jax.ShapeDtypeStruct(shape, dtype)
        for name, (dtype, shape) in arrays.items()
    }


def test_which_dims_are_positions_and_which_arrays_are_sharded_over_them():
    batch = shapes(
        tokens=("int32", (8, 16)),
        weights=("float32", (8, 16)),
        embeddings=("float32", (8, 16, 5)),
        images=("uint8", (8, 32, 32, 3)),
        classes=("float32", (8, 10)),
        labels=("int32", (8,)),
        temperature=("float32", ()),
    )
    found = dict(zip(sorted(batch), sequence_dims(dict(sorted(batch.items())), {})))
    assert {name for name, dim in found.items() if dim == 1} == {"tokens", "weights", "embeddings"}
    specs = batch_specs(batch, {"images": 2}, SIZES)
    assert specs["tokens"][1] == specs["embeddings"][1] == "seq" == specs["images"][2]
    assert all(len(specs[name]) == 1 for name in ("classes", "labels"))
    assert not specs["temperature"]
    ones = batch_specs(batch, {}, {"data": 8, "seq": 1})
    assert all(len(spec) <= 1 for spec in ones.values())


def test_a_dim_that_the_axis_does_not_divide_enters_unsharded():
    specs = batch_specs(shapes(tokens=("int32", (8, 17)), mask=("int32", (8, 16))), {}, SIZES)
    assert len(specs["tokens"]) == 1 and specs["mask"][1] == "seq"


def test_a_batch_without_positions_is_refused_with_what_to_write():
    images = shapes(images=("float32", (8, 32, 32, 3)), labels=("int32", (8,)))
    with pytest.raises(
        BatchError, match=r'mesh\.seq is 4, and no array.*sequence\.dims: \{"images"'
    ):
        check_sequence_dims(images, {}, SIZES)
    check_sequence_dims(images, {"images": 1}, SIZES)
    check_sequence_dims(images, {}, {"seq": 1})
    with pytest.raises(BatchError, match="names 'pixels'; the batch has images, labels"):
        check_sequence_dims(images, {"pixels": 1}, SIZES)
    with pytest.raises(BatchError, match=r"has 4 for 'images', .* 1 to 3"):
        check_sequence_dims(images, {"images": 4}, SIZES)


def feed(processes: int, data: int, seq: int):
    flags = f"--xla_force_host_platform_device_count={4 // processes}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    more = [f"127.0.0.1:{free_port()}", str(processes)]
    command = [sys.executable, "-m", "tests.sequence.feeding_process", *more]
    children = [
        subprocess.Popen(
            [*command, str(i), str(data), str(seq)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env,
        )
        for i in range(processes)
    ]  # fmt: skip
    try:
        outputs = [child.communicate(timeout=240) for child in children]
    finally:
        for child in children:
            child.kill()
    assert not any(child.returncode for child in children), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize(
    ("processes", "data", "seq"), covering([(2, 1, 4), (4, 2, 2), (4, 1, 4)], [(2, 1, 4)])
)
def test_processes_place_their_samples_and_positions(processes, data, seq):
    split = Split([Numbered()], seed=0, shuffle=True)
    expected = [split.batch(step, BATCH) for step in range(STEPS)]
    for index, found in enumerate(feed(processes, data, seq)):
        for ours, theirs in zip(found["batches"], expected, strict=True):
            cut = split_batch(theirs)
            for name in ("tokens", "targets", "segment_ids"):
                np.testing.assert_array_equal(ours[name], getattr(cut, name))
        first, devices = index * 4 // processes, 4 // processes
        ranks = [divmod(device, seq) for device in range(first, first + devices)]
        rows, length = BATCH // data, 8 // seq
        assert found["here"] == [
            [[d * rows, (d + 1) * rows], [s * length, (s + 1) * length]] for d, s in ranks
        ]
        # That is what the process reads, and what its last position predicts.
        rows = sorted({row for (start, stop), _ in found["here"] for row in range(start, stop)})
        begin, end = found["here"][0][1][0], found["here"][-1][1][1]
        read = [
            row for batch in expected for row in batch["tokens"][rows, begin : end + 1].tolist()
        ]
        assert found["read"][: len(read)] == read
