"""Arrow folders of the library `datasets`, Arrow files and Parquet: columns of texts and of ids."""

import json
import random

import pytest

from jaxspeed.errors import DataError
from tests.data.corpora import opened, sentences

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.fast

TEXTS = sentences(40)
IDS = [[1 + ord(c) % 500 for c in text] for text in TEXTS]
COLUMNS = {"text": TEXTS, "input_ids": IDS, "number": [0] * len(TEXTS)}


def streamed(file, table, new=pyarrow.ipc.new_stream):
    with pyarrow.OSFile(str(file), "wb") as out, new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def saved(folder, *names):
    """What `Dataset.save_to_disk` writes of these columns, in two files."""
    folder.mkdir(parents=True)
    table = pyarrow.table({name: COLUMNS[name] for name in names})
    files = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for file, part in zip(files, (table.slice(0, 15), table.slice(15))):
        streamed(folder / file, part)
    state = {"_data_files": [{"filename": file} for file in files], "_fingerprint": "0" * 16}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    streamed(folder / "cache-0123456789abcdef.arrow", table)  # of a `map`; not of the data set
    return folder


def a_file(folder, *names):
    folder.mkdir()
    table = pyarrow.table({name: COLUMNS[name] for name in names})
    streamed(folder / "a.arrow", table, pyarrow.ipc.new_file)
    return folder


def a_parquet(folder, *names):
    folder.mkdir()
    parquet.write_table(
        pyarrow.table({name: COLUMNS[name] for name in names}), folder / "a.parquet"
    )
    return folder


def start(kind, folder, **more):
    return opened({"source": kind, "path": str(folder), **more})


def same(a, b):
    assert (a.train.samples, a.held_out.samples) == (b.train.samples, b.held_out.samples)
    for step in range(3):
        for name, x in b.train.batch(step, 4).items():
            assert (a.train.batch(step, 4)[name] == x).all()


WRITERS = {"arrow": saved, "huggingface": saved, "arrow file": a_file, "parquet": a_parquet}


@pytest.mark.parametrize("written", WRITERS)
def test_texts_and_ids_are_read_from_their_columns(tmp_path, written):
    kind = written.removesuffix(" file")
    texts = WRITERS[written](tmp_path / "texts", "number", "text", "input_ids")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in TEXTS))
    same(start(kind, texts), start("jsonl", tmp_path / "a.jsonl"))
    ids = WRITERS[written](tmp_path / "ids", "number", "input_ids")
    same(start(kind, ids), documents(tmp_path, IDS))


def documents(folder, ids):
    """The corpus of these documents, from ids of one column of jaxspeed's own name."""
    folder = folder / "expected"
    folder.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table({"tokens": ids}), folder / "a.parquet")
    return start("parquet", folder)


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
def test_lists_of_each_type_and_padding(tmp_path, kind):
    rows = [ids[:8] for ids in IDS if len(ids) > 8]
    types = {
        "list": pyarrow.list_(pyarrow.int32()),
        "large_list": pyarrow.large_list(pyarrow.uint16()),
        "fixed": pyarrow.list_(pyarrow.int64(), 10),
    }
    table = pyarrow.table(
        {
            "input_ids": pyarrow.array([[*row, 9, 9] for row in rows], types[kind]),
            "attention_mask": pyarrow.array([[1] * 8 + [0] * 2 for _ in rows], types[kind]),
            "labels": pyarrow.array(
                [row + [-100] * 2 for row in rows], pyarrow.list_(pyarrow.int64())
            ),
        }
    )
    streamed(tmp_path / "a.arrow", table.slice(3))
    same(start("arrow", tmp_path), documents(tmp_path, rows[3:]))


def test_a_split_of_a_dataset_dict_is_read(tmp_path):
    for split in ("train", "test"):
        saved(tmp_path / "saved" / split, *("text",) if split == "train" else ("input_ids",))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    same(start("arrow", tmp_path / "saved"), start("arrow", tmp_path / "saved" / "train"))
    assert start("arrow", tmp_path / "saved", split="test").tokenizer is None
    with pytest.raises(DataError, match=r"data\.split: .*'dev'; its splits: train, test"):
        start("arrow", tmp_path / "saved", split="dev")


def wrong(match, kind, folder):
    with pytest.raises(DataError, match=match) as caught:
        start(kind, folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written", WRITERS)
def test_columns_are_named_where_none_has_texts_or_ids(tmp_path, written):
    folder = WRITERS[written](tmp_path / "a", "number")
    match = r'no field "text" \(data\.text_field\), tokens or input_ids; its fields: number'
    wrong(match, written.removesuffix(" file"), folder)


def test_columns_of_other_types_are_named(tmp_path):
    for name, column, match in (
        ("text", [5] * 9, r'a\.arrow, row 0: the field "text" holds a int, not text'),
        ("text", ["a", None], r"row 1: .* holds a NoneType"),
        ("tokens", [5] * 9, r"a\.arrow: 'tokens' holds int64, not lists of ids"),
        ("tokens", ["a b"] * 9, r"a\.arrow: 'tokens' holds string, not lists of ids"),
        ("tokens", [[1.5]] * 9, "row 0: 'tokens' holds float64"),
        ("tokens", [[["a"]]] * 9, "row 0: 'tokens' holds object"),
    ):
        streamed(tmp_path / "a.arrow", pyarrow.table({name: column}))
        wrong(match, "arrow", tmp_path)


def test_a_state_that_is_none_or_names_files_outside_is_refused(tmp_path):
    folder = saved(tmp_path / "a", "text")
    for content, match in (
        ("", "JSONDecodeError"),
        ("[]", "state.json' cannot be read"),
        ("[" * 100_000, "state.json' cannot be read"),
        ('{"_data_files": [{"filename": "../b.arrow"}]}', "other than names of files"),
        ('{"_data_files": [{"filename": "/etc/passwd"}]}', "other than names of files"),
        ('{"_data_files": [{"filename": ".."}]}', "other than names of files"),
        ('{"_data_files": [{"filename": "no.arrow"}]}', r"lists 'no\.arrow', which is not there"),
        ('{"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}', "i.arrow|an early"),
        ('{"_data_files": []}', "lists no file"),
    ):
        (folder / "state.json").write_text(content)
        wrong(match, "arrow", folder)


def test_damaged_files_are_named(tmp_path):
    rng = random.Random(0)
    for write, kind in ((saved, "arrow"), (a_file, "arrow"), (a_parquet, "parquet")):
        folder = write(tmp_path / write.__name__, "input_ids")
        names = ("data-00000-of-00002.arrow", "a.arrow", "a.parquet")
        file = next(folder / name for name in names if (folder / name).exists())
        sound = file.read_bytes()
        refused = 0
        damaged = [sound[: len(sound) // 2], b"", b"text", sound[:3]]
        for _ in range(40):
            i = rng.randrange(len(sound))
            damaged.append(bytes([*sound[:i], rng.randrange(256), *sound[i + 1 :]]))
        for content in damaged:
            file.write_bytes(content)
            try:
                start(kind, folder)
            except DataError as error:
                refused += str(folder) in str(error)
        assert refused >= 4, kind


def test_what_the_library_datasets_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    from datasets.table import InMemoryTable

    def made(**columns):  # with fingerprints, which the library else makes by pickling
        return datasets.Dataset(InMemoryTable(pyarrow.table(columns)), fingerprint="a" * 16)

    chosen = made(text=TEXTS).select([*range(30, 0, -1)], new_fingerprint="b" * 16)
    datasets.DatasetDict({"train": chosen}).save_to_disk(tmp_path / "a", num_shards={"train": 3})
    expected = "".join(json.dumps({"text": TEXTS[i]}) + "\n" for i in range(30, 0, -1))
    (tmp_path / "a.jsonl").write_text(expected)
    same(start("arrow", tmp_path / "a"), start("jsonl", tmp_path / "a.jsonl"))
    made(input_ids=IDS).save_to_disk(tmp_path / "b")
    same(start("huggingface", tmp_path / "b"), documents(tmp_path, IDS))
