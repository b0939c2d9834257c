"""Raw files of token ids, as nanoGPT writes them, and arrays of ids in memory."""

import json
import pickle
import sys
import types

import numpy as np
import pytest

from jaxspeed.config.run_sections import SourceSection
from jaxspeed.data import token_store
from jaxspeed.data.open_source import by_file
from jaxspeed.errors import DataError
from tests.data.corpora import opened

pytestmark = pytest.mark.fast

IDS = np.random.default_rng(0).integers(0, 512, 2000)


def raw(file, dtype="uint16", ids=IDS):
    file.parent.mkdir(exist_ok=True)
    ids.astype(dtype).tofile(file)
    return file


def start(file, dtype=None, **limits):
    return opened({"source": "tokens", "path": str(file), "dtype": dtype}, **limits)


def wrong(match, file, dtype=None, **limits):
    with pytest.raises(DataError, match=match) as caught:
        start(file, dtype, **limits)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_a_raw_file_has_the_samples_of_the_same_ids_in_a_npy_file(tmp_path, dtype):
    ids = IDS % 256
    np.save(tmp_path / "ids.npy", ids)
    expected = start(tmp_path / "ids.npy")
    c = start(raw(tmp_path / "train.bin", dtype, ids), dtype)
    assert isinstance(c.train.parts[0].parts[0].stream.tokens, np.memmap)
    assert (c.train.samples, c.held_out.samples) == (
        expected.train.samples,
        expected.held_out.samples,
    )
    for step in range(3):
        for name, x in expected.train.batch(step, 8).items():
            assert (c.train.batch(step, 8)[name] == x).all()


def test_samples_are_the_ids_in_the_order_of_the_file(tmp_path):
    c = opened(
        {
            "source": "tokens",
            "path": str(raw(tmp_path / "a.dat")),
            "dtype": "uint16",
            "shuffle": False,
            "held_out": 0,
        }
    )
    assert (c.train.batch(1, 4)["tokens"][2] == IDS[6 * 16 : 7 * 16 + 1]).all()
    # Rows of a process, and the step at which a run continues.
    assert (c.train.batch(5, 4, slice(2, 4))["tokens"] == c.train.batch(5, 4)["tokens"][2:]).all()


def test_the_dtype_is_found_in_a_meta_json(tmp_path):
    file = raw(tmp_path / "train.bin", "uint32")
    wrong(r"data.dtype: .*train\.bin' is a raw file.*uint16.*meta\.json", file)
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint32", "vocab_size": 512}))
    assert start(file).fingerprint == start(file, "uint32").fingerprint
    for content, match in (
        ('{"dtype": "float32"}', r"in meta\.json beside it is none of these"),
        ('{"dtype": ["uint16"]}', "is none of these"),
        ("[]", r"meta\.json beside it is no object with"),
        ("", "is no object with"),
        ("[" * 100_000, "is no object with"),
    ):
        (tmp_path / "meta.json").write_text(content)
        wrong(match, file)


class Opens:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def test_a_pickle_beside_it_is_not_read(tmp_path):
    file = raw(tmp_path / "train.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Opens()))
    wrong(r"meta\.pkl is not read: a pickle can run any code", file)
    assert start(file, "uint16").train.samples


def test_a_folder_with_nanogpts_two_files_is_not_read_as_one(tmp_path):
    for name in ("train.bin", "val.bin"):
        raw(tmp_path / name)
    wrong(r"holds train\.bin and val\.bin; name the one to read: .*train\.bin", tmp_path, "uint16")
    (tmp_path / "val.bin").unlink()
    assert start(tmp_path, "uint16").train.samples


def test_files_that_are_no_such_ids_are_named(tmp_path):
    file = raw(tmp_path / "train.bin")
    file.write_bytes(file.read_bytes()[:-1])
    wrong(r"train\.bin' has 3,999 bytes, which 2 \(of uint16\) does not divide", file, "uint16")
    wrong(r"has 3,999 bytes, which 4 \(of uint32\)", file, "uint32")
    file.write_bytes(b"")
    wrong(r"train\.bin' is empty", file, "uint16")
    raw(file, "uint16")
    wrong(r"\(raw uint32\) has ids up to [\d,]+, but the model's", file, "uint32")
    wrong(r"\(raw uint16\) has ids up to 511, but .* has 500", file, "uint16", vocab_size=500)
    raw(file, "int32", -IDS)
    wrong("negative ids", file, "int32")


def test_uint32_that_is_read_as_uint16_is_reported(tmp_path, caplog):
    start(raw(tmp_path / "a.bin"), "uint16")
    assert not caplog.records
    start(raw(tmp_path / "b.bin", "uint32"), "uint16")
    assert "b.bin: every second id is 0, as in a file of uint32" in caplog.text


def test_all_ids_of_a_long_file_are_read_once(tmp_path, monkeypatch):
    passes, real = [], token_store._Digest.add
    monkeypatch.setattr(token_store, "_LONG", 1000)
    monkeypatch.setattr(
        token_store._Digest, "add", lambda *given: (passes.append(1), real(*given))[1]
    )
    file = raw(tmp_path / "train.bin")
    found = {start(file, "uint16").fingerprint for _ in range(3)}
    assert len(found) == 1 and len(passes) == 1
    raw(file, "uint16", IDS[::-1])
    assert start(file, "uint16").fingerprint not in found and len(passes) == 2
    (record,) = tmp_path.glob(".train.bin*")
    for content in ("", "[]", json.dumps(json.loads(record.read_text()) | {"largest": "x"})):
        record.write_text(content)
        start(file, "uint16")
    assert len(passes) == 5
    # What a record says is never taken for a bound: ids are compared as they are read.
    record.write_text(json.dumps(json.loads(record.read_text()) | {"largest": 0}))
    with pytest.raises(DataError, match=r"token \d+ is"):
        start(file, "uint16", vocab_size=256)
    assert len(passes) == 5


@pytest.mark.parametrize("shape", [(2000,), (40, 50)])
def test_an_array_that_a_module_holds_is_not_copied(tmp_path, monkeypatch, shape):
    np.save(tmp_path / "ids.npy", IDS.reshape(shape))
    mapped = np.memmap(raw(tmp_path / "ids.bin"), np.uint16, mode="r").reshape(shape)
    module = types.ModuleType("users_ids")
    module.mapped, module.make = mapped, lambda: IDS.reshape(shape)
    monkeypatch.setitem(sys.modules, "users_ids", module)
    expected = start(tmp_path / "ids.npy")
    for name in ("mapped", "make"):
        c = opened({"source": f"users_ids:{name}"})
        stream = c.train.parts[0].parts[0].stream
        assert np.shares_memory(stream.tokens, mapped if name == "mapped" else IDS)
        for key, x in expected.train.batch(2, 8).items():
            assert (c.train.batch(2, 8)[key] == x).all()


def test_files_to_evaluate_on_are_of_the_kind_that_their_names_show(tmp_path):
    val = str(raw(tmp_path / "val.bin"))
    (tmp_path / "a.jsonl.zst").touch()
    (tmp_path / "a.arrow").touch()
    found = by_file(SourceSection(paths=[val, *map(str, tmp_path.glob("a.*"))], dtype="uint16"))
    kinds = {name.rpartition("/")[2]: section.source for name, section in found.items()}
    assert kinds == {"val.bin": "tokens", "a.jsonl.zst": "jsonl", "a.arrow": "arrow"}
    assert found[val].dtype == "uint16"


def test_what_describes_raw_files_of_a_folder_is_not_evaluated(tmp_path):
    file, meta = raw(tmp_path / "val.bin"), tmp_path / "meta.json"
    meta.write_text('{"dtype": "uint16"}')
    assert [*by_file(SourceSection(path=str(tmp_path)))] == [str(file)]
    assert [*by_file(SourceSection(path=str(meta)))] == [str(meta)]
