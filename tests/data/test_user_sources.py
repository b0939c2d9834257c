"""Iterables of a user's own: records with ids, loaders of batches, tensors of other libraries."""

import json
import sys
import types

import grain
import numpy as np
import pytest

from jaxspeed.config.objective_keys import imported
from jaxspeed.data import open_source
from jaxspeed.errors import DataError
from tests.data.corpora import opened
from tests.support.tensors import DlpackTensor, Loader, Tensor

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 512, 5 + RNG.integers(60)) for _ in range(40)]
ROWS = RNG.integers(0, 512, (40, 24))


def test_an_import_path_is_searched_in_the_current_folder_last(tmp_path, monkeypatch):
    (tmp_path / "records_here.py").write_text("from json import loads as read")
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert imported("records_here:read") is json.loads  # the library's, not the folder's
    assert sys.path[-1] == str(tmp_path)
    with pytest.raises(ImportError):
        imported("no_such_records:read")


@pytest.fixture
def source(monkeypatch):
    """The corpus of an object, by an import path."""

    def corpus(found, **limits):
        module = types.ModuleType("users_data")
        module.data = found
        monkeypatch.setitem(sys.modules, "users_data", module)
        return opened({"source": "users_data:data"}, **limits)

    return corpus


def same(a, b):
    assert (a.train.samples, a.held_out.samples) == (b.train.samples, b.held_out.samples)
    for step in range(3):
        expected = b.train.batch(step, 4)
        found = a.train.batch(step, 4)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert found[name].dtype == x.dtype and (found[name] == x).all()


@pytest.mark.parametrize("field", ["tokens", "input_ids"])
@pytest.mark.parametrize("make", [np.asarray, list, Tensor], ids=["arrays", "lists", "tensors"])
def test_records_with_ids_are_the_documents(source, field, make):
    records = [{"id": i, field: make(ids)} for i, ids in enumerate(DOCUMENTS)]
    same(source(records), source(DOCUMENTS))


def test_padding_is_left_out(source):
    padded = []
    for ids in DOCUMENTS:
        mask = np.arange(70) < len(ids)
        filled = np.where(mask, np.resize(ids, 70), 9)
        labels = np.where(mask, filled, -100)
        padded.append({"input_ids": filled, "attention_mask": mask.astype(int), "labels": labels})
    same(source(padded), source(DOCUMENTS))


def grain_loader(tensor):
    class Source:
        def __len__(self):
            return len(ROWS)

        def __getitem__(self, i):
            return {"input_ids": tensor(ROWS[i])}

    sampler = grain.samplers.SequentialSampler(len(ROWS), grain.sharding.NoSharding())
    return grain.DataLoader(
        data_source=Source(), sampler=sampler, operations=[grain.transforms.Batch(8)]
    )


LOADERS = {
    "grain's DataLoader": lambda: grain_loader(np.asarray),
    "grain's MapDataset": lambda: grain.MapDataset.source(list(ROWS)).map(
        lambda x: {"input_ids": x}
    ),
    "grain's IterDataset in batches": lambda: (
        grain.MapDataset.source(list(ROWS)).map(lambda x: {"tokens": x}).to_iter_dataset().batch(8)
    ),
    "tensors with __array__": lambda: Loader({"input_ids": ROWS}, 8, Tensor),
    "tensors with DLPack": lambda: Loader({"input_ids": ROWS}, 8, DlpackTensor),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_rows_of_a_loaders_batches_are_the_documents(source, name):
    same(source(LOADERS[name]()), source(list(ROWS)))


@pytest.mark.parametrize("kind", [np.asarray, Tensor, DlpackTensor])
def test_the_rows_of_a_loaders_batches_are_samples_of_a_model_that_reads_arrays(source, kind):
    arrays = {"x": RNG.normal(size=(40, 3)).astype(np.float32), "y": np.arange(40, dtype=np.int32)}
    samples = [{"x": x, "y": y} for x, y in zip(*arrays.values())]
    own = {"sample": None, "seq_len": None}
    same(source(Loader(arrays, 7, kind), **own), source(samples, **own))


def test_batches_of_images_are_found_by_their_shape(source):
    images = RNG.normal(size=(40, 8, 8, 3)).astype(np.float32)
    batches = [{"images": images[i : i + 8], "labels": np.arange(8)} for i in range(0, 40, 8)]
    c = source(batches, sample="images", image_shape=(8, 8, 3))
    assert c.train.batch(0, 4)["images"].shape == (4, 8, 8, 3)
    assert c.train.samples + c.held_out.samples == 40


def test_rows_of_ids_are_read_as_they_are_by_a_model_that_is_not_known(source):
    records = [{"tokens": row} for row in ROWS]
    batch = source(records, sample=None, seq_len=None).train.batch(0, 4)
    assert batch["tokens"].shape == (4, 24) and set(batch) == {"tokens"}


IDS = {"input_ids": [1, 2, 3]}
WRONG = {
    "item 1: no field 'input_ids'; its fields: ids": [IDS, {"ids": [1]}],
    "item 1: a list, but the first is a mapping": [IDS, [1, 2]],
    r"item 1, 'input_ids': .*inhomogeneous": [IDS, {"input_ids": [[1, 2], [3]]}],
    r"item 0: 'input_ids' holds float64\[2\]; ids must be integers": [{"input_ids": [1.0, 2.0]}],
    r"item 0: 'input_ids' holds int64\[1, 1, 2\]": [{"input_ids": [[[1, 2]]]}],
    "item 0: 'input_ids' holds negative ids": [{"input_ids": [1, -2]}],
    r"'attention_mask' has \[2\], but 'input_ids' \[3\]": [IDS | {"attention_mask": [1, 1]}],
    "item 1: 'labels' differ from 'input_ids'": [IDS, IDS | {"labels": [-100, 2, 3]}],
    "ids up to 600, but the model's vocabulary has 512": [{"input_ids": [600] * 99}],
}


@pytest.mark.parametrize("match", WRONG)
def test_records_that_hold_no_such_ids_are_named(source, match):
    with pytest.raises(DataError, match=match) as caught:
        source(WRONG[match])
    assert "\n" not in str(caught.value)


def test_batches_whose_samples_do_not_go_together_are_named(source):
    batches = Loader({"x": np.zeros((8, 2))}, 4, np.asarray)
    batches.arrays["y"] = np.zeros(5)
    with pytest.raises(DataError, match=r"batch 1 has .*its samples do not go together"):
        source(batches, sample=None)


def test_a_tensor_that_cannot_be_read_is_named(source):
    class Elsewhere(Tensor):
        def __array__(self, *args, **kwargs):
            raise RuntimeError("it requires grad")

    with pytest.raises(DataError, match=r"item 0, 'tokens' is a .*Elsewhere.*it requires grad"):
        source([{"tokens": Elsewhere(ROWS[0])}])


def test_an_iterable_that_may_have_no_end_is_reported(source, monkeypatch, caplog):
    source([{"tokens": row} for row in ROWS])
    assert not caplog.records
    monkeypatch.setattr(open_source, "_LONG_READ", -1)
    source([{"tokens": row} for row in ROWS])
    (record,) = caplog.records
    assert "users_data:data: 1 items so far" in record.message and "data.samples" in record.message
