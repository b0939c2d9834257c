"""Token folders: what is checked at each start, once, on demand, and as ids are read."""

import json
import os
import shutil

import numpy as np
import pytest

from jaxspeed.cli.main import parser
from jaxspeed.config.run_sections import Data
from jaxspeed.data import token_store, tokenize
from jaxspeed.errors import DataError
from tests.data.corpora import opened, sentences, text_files

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of 60 documents of 16-bit ids below 300."""
    folder = tmp_path_factory.mktemp("written")
    texts = text_files(folder / "texts", sentences(60))
    data = {"source": "text", "path": str(texts), "tokenizer": "bpe", "vocab_size": 300}
    tokenize(Data(**data), folder / "tokens")
    return folder / "tokens"


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "tokens")


@pytest.fixture
def hashed(monkeypatch):
    """The passes over all tokens so far."""
    passes, real = [], token_store._digest_of
    monkeypatch.setattr(
        token_store, "_digest_of", lambda *given: (passes.append(1), real(*given))[1]
    )
    return passes


def start(folder, **limits):
    return opened({"source": "tokens", "path": str(folder), "held_out": 0}, **limits)


def save(folder, name, change):
    np.save(folder / f"{name}.npy", change(np.load(folder / f"{name}.npy")))


def replaced(at, value):
    def change(x):
        return np.concatenate([x[:at], [value], x[at + 1 :]]).astype(x.dtype)

    return change


STRUCTURE = {
    "float tokens": ("tokens", lambda x: x.astype(np.float16), r"tokens\.npy holds float16"),
    "signed tokens": ("tokens", lambda x: -x.astype(np.int16), r"tokens\.npy holds int16"),
    "wider tokens": ("tokens", lambda x: x.astype(np.uint32), r"holds <u4, but its header lists"),
    "rows of tokens": ("tokens", lambda x: x[:, None], r"tokens\.npy holds uint16\["),
    "fewer tokens": ("tokens", lambda x: x[:-1], r"its header lists"),
    "float offsets": ("offsets", lambda x: x.astype(float), r"offsets\.npy holds float64"),
    "narrow offsets": ("offsets", lambda x: x.astype(np.int32), r"offsets\.npy holds int32"),
    "fewer offsets": ("offsets", lambda x: x[1:], r"its header lists"),
    "a later first one": ("offsets", replaced(0, 1), r"goes from 1 to"),
    "an earlier last one": ("offsets", lambda x: np.minimum(x, x[-1] - 1), r"goes from 0 to"),
    "a negative one": ("offsets", replaced(3, -7), r"does not rise from \d+ to -7, document 2"),
    "an empty document": ("offsets", lambda x: replaced(3, x[2])(x), r"does not rise"),
}


@pytest.mark.parametrize("case", STRUCTURE)
def test_sizes_dtypes_and_offsets_are_checked_at_each_start(folder, monkeypatch, case):
    name, change, problem = STRUCTURE[case]
    start(folder)
    save(folder, name, change)
    monkeypatch.setattr(token_store, "_digest_of", lambda *_: pytest.fail("needs no pass"))
    with pytest.raises(DataError, match=rf"tokens' is damaged: .*{problem}"):
        start(folder)


def test_bytes_beyond_the_tokens_are_named(folder):
    with (folder / "tokens.npy").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=r"tokens\.npy has [\d,]+ bytes, not "):
        start(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [("tokens", lambda x: x[::-1]), ("offsets", lambda x: replaced(3, x[3] - 1)(x))],
    ids=["tokens", "offsets"],
)
def test_files_that_were_changed_between_two_starts_are_refused(folder, name, change):
    start(folder)
    save(folder, name, change)
    with pytest.raises(DataError, match="not those that were written"):
        start(folder)


def test_all_tokens_are_compared_when_a_folder_is_opened_first(folder, hashed):
    for _ in range(3):
        start(folder)
    assert len(hashed) == 1
    os.utime(folder / "tokens.npy", (1, 1))
    for _ in range(2):
        start(folder)
    assert len(hashed) == 2


def test_a_folder_that_cannot_be_written_is_compared_at_each_start(folder, hashed):
    (folder / token_store.VERIFIED).mkdir()
    for _ in range(2):
        start(folder)
    assert len(hashed) == 2
    assert {file.name for file in folder.iterdir()} == {
        *(token_store.HEADER, token_store.TOKENS, token_store.OFFSETS),
        *("tokenizer.json", token_store.VERIFIED),
    }


def test_verify_finds_what_no_time_of_a_file_shows(folder, capsys):
    def verify():
        given = parser().parse_args(["data", "verify", str(folder), "--json"])
        return given.run(given), json.loads(capsys.readouterr().out)

    start(folder)
    assert verify() == (0, {str(folder): ""})
    before = (folder / "tokens.npy").stat()
    save(folder, "tokens", lambda x: x[::-1])
    os.utime(folder / "tokens.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    start(folder)
    code, problems = verify()
    assert code == 1 and "not those that were written" in problems[str(folder)]


@pytest.mark.parametrize("vocab_size", [512, 300])
def test_ids_beyond_the_vocabulary_are_refused_as_they_are_read(folder, vocab_size):
    train = start(folder, vocab_size=vocab_size).train
    tokens = np.load(folder / "tokens.npy", mmap_mode="r+")
    tokens[:] = vocab_size - 1
    assert (train.batch(0, 8)["tokens"] == vocab_size - 1).all()
    tokens[5] = vocab_size
    with pytest.raises(DataError, match=rf"token 5 is {vocab_size}, but ids go from 0 to"):
        for step in range(train.samples // 8 + 1):
            train.batch(step, 8)


def test_negative_ids_are_refused_as_they_are_read(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(400, dtype=np.int16))
    data = {"source": "tokens", "path": str(tmp_path / "a.npy"), "held_out": 0}
    train = opened(data).train
    np.load(tmp_path / "a.npy", mmap_mode="r+")[7] = -2
    with pytest.raises(DataError, match="token 7 is -2, but ids go from 0 to"):
        list(train.once(1))


def test_a_folder_without_its_header_is_no_folder_of_npy_files(folder):
    (folder / token_store.HEADER).unlink()
    with pytest.raises(DataError, match=r"not a token folder: it has no header\.json"):
        start(folder)
