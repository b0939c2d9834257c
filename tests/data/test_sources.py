"""What is read from files, and what is said of files that cannot be read."""

import gzip
import sys
import types

import numpy as np
import pytest

from jaxspeed.config.run_sections import SourceSection
from jaxspeed.data.model_limits import ModelLimits
from jaxspeed.data.open_source import open_source
from jaxspeed.data.sources import stdlib
from jaxspeed.errors import DataError
from tests.data.corpora import json_lines, opened, sentences, text_files

pytestmark = pytest.mark.fast

TEXTS = sentences(6)


def read(**source):
    return list(open_source(SourceSection(**source), ModelLimits()))


def module(monkeypatch, **names):
    made = types.ModuleType("users_data")
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, "users_data", made)


# -- what is read -------------------------------------------------------------------------------


def test_text_comes_from_files_folders_and_globs_sorted_and_each_once(tmp_path):
    folder = text_files(tmp_path / "texts", TEXTS)
    (folder / ".hidden").write_text("not this")
    assert read(source="text", path=str(folder)) == TEXTS
    assert read(source="text", path=str(folder / "*.txt")) == TEXTS
    assert read(source="text", path=str(folder / "0002.txt")) == [TEXTS[2]]
    both = [str(folder / "0003.txt"), str(folder)]
    assert read(source="text", paths=both) == [TEXTS[3], *TEXTS[:3], *TEXTS[4:]]


def test_a_source_can_be_read_again(tmp_path):
    texts = open_source(
        SourceSection(source="text", path=str(text_files(tmp_path, TEXTS))), ModelLimits()
    )
    assert list(texts) == list(texts) == TEXTS


def test_json_lines_come_plain_and_compressed(tmp_path):
    file = json_lines(tmp_path / "a.jsonl", TEXTS, "body")
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as out:
        out.write(file.read_bytes() + b"\n")
    assert read(source="jsonl", path=str(tmp_path), text_field="body") == TEXTS * 2


def test_an_own_iterable_gives_texts_or_records_and_may_have_no_end(monkeypatch):
    def endless():
        while True:
            yield "again"

    module(monkeypatch, texts=TEXTS, records=[{"body": t} for t in TEXTS], endless=endless)
    assert read(source="users_data:texts") == TEXTS
    assert read(source="users_data:records", text_field="body") == TEXTS
    assert read(source="users_data:endless", samples=3) == ["again"] * 3


def test_an_iterator_that_can_be_read_once_is_stored(monkeypatch):
    module(monkeypatch, once=iter(TEXTS))
    texts = open_source(SourceSection(source="users_data:once"), ModelLimits())
    assert list(texts) == list(texts) == TEXTS


def test_the_standard_library_is_the_same_each_time_and_leaves_out_its_tests(tmp_path):
    whole, again = list(stdlib()), list(stdlib())
    assert whole == again and 1e6 < sum(map(len, whole)) <= 8 << 20
    for name in ("a.py", "b/c.py", "test/d.py", "encodings/e.py", "b/__pycache__/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"# \xe4")
    assert list(stdlib(tmp_path)) == ["a.py", "b/c.py"]


def test_the_cap_on_the_standard_library_holds(tmp_path):
    text_files(tmp_path, [])
    for i in range(20):
        (tmp_path / f"{i:02}.py").write_text(f"{i:02}" + "x" * 98)
    taken = list(stdlib(tmp_path, limit=550))
    assert len(taken) == 5 and taken == sorted(taken)
    assert taken != [f"{i:02}" + "x" * 98 for i in range(5)]  # not simply the first


def test_parquet_and_hugging_face_give_the_texts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": TEXTS, "n": [0] * 6}), tmp_path / "a.parquet")
    assert read(source="parquet", path=str(tmp_path)) == TEXTS
    with pytest.raises(DataError, match=r'no field "body".*text, n'):
        read(source="parquet", path=str(tmp_path), text_field="body")
    pytest.importorskip("datasets")
    assert read(source="huggingface", path=str(tmp_path)) == TEXTS
    with pytest.raises(DataError, match="split 'nosuch'"):
        read(source="huggingface", path=str(tmp_path), split="nosuch")


@pytest.mark.parametrize(
    "kind, library, extra",
    [
        ("parquet", "pyarrow", "arrow"),
        ("arrow", "pyarrow", "arrow"),
        ("huggingface", "datasets", "hf"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, tmp_path, kind, library, extra):
    (tmp_path / f"a.{kind}").touch()
    for name in (library, f"{library}.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=rf"{library}.*install jaxspeed\[{extra}\]"):
        read(source=kind, path=str(tmp_path))


# -- arrays ---------------------------------------------------------------------------------------


def images(n=40, dtype=np.uint8):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, 8, 8, 3)).astype(dtype), rng.integers(0, 10, n)


def test_images_come_from_npz_and_from_folders_of_npy(tmp_path):
    x, y = images()
    np.savez(tmp_path / "a.npz", images=x, labels=y)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "images.npy", x)
    np.save(tmp_path / "folder" / "labels.npy", y)
    limits = {"sample": "images", "image_shape": (8, 8, 3), "classes": 10}
    for path in ("a.npz", "folder"):
        data = {"source": "images", "path": str(tmp_path / path), "held_out": 0.1}
        c = opened(data, **limits)
        assert (c.train.samples, c.held_out.samples) == (36, 4)
        batch = c.held_out.padded(0, 4)
        assert batch["images"].dtype == np.float32 and batch["labels"].dtype == np.int32
        where = [int(np.flatnonzero((x / 127.5 - 1 - i).__abs__().max((1, 2, 3)) < 1e-6)[0])
                 for i in batch["images"]]  # fmt: skip
        assert batch["labels"].tolist() == y[where].tolist()


def test_the_padding_of_images_does_not_count(tmp_path):
    x, y = images()
    np.savez(tmp_path / "a.npz", images=x, labels=y)
    data = {"source": "images", "path": str(tmp_path / "a.npz"), "held_out": 0.25}
    c = opened(data, sample="images")
    labels = np.concatenate([b["labels"] for b in c.held_out.once(8)])
    assert len(labels) == 16 and (labels[10:] == -100).all() and (labels[:10] >= 0).all()


def test_an_own_iterable_of_arrays_is_read_by_rows(monkeypatch):
    samples = [{"x": np.full(3, i, np.float64), "y": np.float64(i)} for i in range(20)]
    module(monkeypatch, samples=samples)
    c = opened({"source": "users_data:samples", "held_out": 0.25}, sample=None, seq_len=None)
    batch = c.train.batch(0, 5)
    assert batch["x"].shape == (5, 3) and batch["x"].dtype == np.float32
    assert (batch["x"][:, 0] == batch["y"]).all()
    *_, last = c.held_out.once(3)
    assert last["mask"].tolist() == [1, 1, 0]
    assert c.tokenizer is None and c.unigram_entropy is None


def test_an_own_iterable_of_token_documents_is_packed(monkeypatch):
    module(monkeypatch, documents=lambda: ([i + 1] * 10 for i in range(30)))
    c = opened({"source": "users_data:documents", "held_out": 0, "shuffle": False})
    assert c.held_out is None and c.tokenizer is None
    assert c.train.batch(0, 1)["tokens"][0].tolist() == [1] * 10 + [2] * 7


# -- what cannot be read ------------------------------------------------------------------------


def wrong(match, **source):
    with pytest.raises(DataError, match=match):
        opened(source)


def test_missing_files_are_named_with_what_is_there(tmp_path):
    text_files(tmp_path, TEXTS[:2])
    wrong(r"nosuch\.txt' does not exist.*0000\.txt, 0001\.txt", source="text",
          path=str(tmp_path / "nosuch.txt"))  # fmt: skip
    wrong(r"no file matches '.*\*\.md'", source="text", path=str(tmp_path / "*.md"))
    wrong(r"holds no \.jsonl or", source="jsonl", path=str(tmp_path))
    wrong("'nowhere/at/all' does not exist", source="tokens", path="nowhere/at/all")


def test_binary_and_undecodable_files_are_named(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"ab\0c")
    wrong(r"binary\.txt' is not text: it is binary \(byte 2 is 0\)", source="text",
          path=str(tmp_path / "binary.txt"))  # fmt: skip
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    wrong(r"latin\.txt' is not UTF-8 text: byte 1 is 0xfc", source="text",
          path=str(tmp_path / "latin.txt"))  # fmt: skip


@pytest.mark.parametrize(
    "line, match",
    [
        (b'{"text": "a"', "line 2: not JSON"),
        (b'{"txt": "a"}', r'line 2: no field "text" \(data.text_field\); its fields: txt'),
        (
            b'{"question": "a", "answer": "b"}',
            "its fields: question, answer. A conversation has messages, prompt and completion, or",
        ),
        (b'{"text": 5}', 'line 2: the field "text" holds a int, not text'),
        (b'["a"]', "line 2: a list, not an object"),
        (b'{"text": "\xff"}', "line 2: not JSON: not UTF-8"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, match):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    wrong(rf"a\.jsonl, .*{match}", source="jsonl", path=str(tmp_path / "a.jsonl"))


def test_a_truncated_gzip_file_is_named(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])
    wrong(r"a\.jsonl\.gz' cannot be read", source="jsonl", path=str(tmp_path))


def test_arrays_that_do_not_fit_the_model_are_refused(tmp_path):
    x, y = images()
    np.savez(tmp_path / "a.npz", images=x, labels=y)
    source = {"source": "images", "path": str(tmp_path / "a.npz")}
    for limits, match in (
        (
            {"image_shape": (32, 32, 3)},
            r"images are \[8, 8, 3\], but the model reads \[32, 32, 3\]",
        ),
        ({"classes": 3}, "labels range from 0 to 8, but the model has 3 classes"),
    ):
        with pytest.raises(DataError, match=match):
            opened(source, sample="images", **limits)
    np.savez(tmp_path / "a.npz", x=x)
    with pytest.raises(DataError, match=r"it holds x, not images and labels"):
        opened(source, sample="images")
    (tmp_path / "a.npz").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"a\.npz' cannot be read"):
        opened(source, sample="images")


def test_an_own_iterable_that_is_none_is_named(monkeypatch):
    module(
        monkeypatch, number=5, nothing=[], mixed=[[1, 2], "a"], ragged=[{"x": [1]}, {"x": [1, 2]}]
    )
    wrong("'users_data:nosuch' cannot be imported", source="users_data:nosuch")
    wrong("is a int, no iterable", source="users_data:number")
    wrong("has no items", source="users_data:nothing")
    wrong("item 1 is a str", source="users_data:mixed")
    with pytest.raises(DataError, match=r"sample 1 has .*but the first has"):
        opened({"source": "users_data:ragged"}, sample=None)
