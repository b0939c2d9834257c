"""Text has the ids that the library `sentencepiece` gives it, and comes back."""

import io
import random
import sys

import numpy as np
import pytest
import sentencepiece as spm
from jaxspeed.models import from_pretrained

import jaxspeed
from jaxspeed.cli.checkpoint import _hf_form
from jaxspeed.cli.main import parser
from jaxspeed.data import tokenize
from jaxspeed.data.tokenizer import read_tokenizer
from jaxspeed.run import open_run, source_of
from jaxspeed.run.start import Source
from tests.data.corpora import opened, text_files
from tests.interop import folders
from tests.run import small

pytestmark = pytest.mark.fast

TEXT = "the quick brown fox jumps over 13 lazy dogs; été naïve Straße 東京 ﬁne １２"
WORDS = TEXT.split()
TEXTS = [
    "the quick brown fox", " leading", "two  spaces   three", "trailing  ", "été naïve Straße",
    "unseen: щ 🙂 \t tab\nnewline", "", " ", "ﬁne １２ Å", "1234 the the", "a▁b",
]  # fmt: skip
FORMS = {
    "llama": {"byte_fallback": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False, "split_digits": True},
    "gemma": {"byte_fallback": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False, "add_dummy_prefix": False,
              "user_defined_symbols": ["\n\n", "▁▁", "<turn>"]},
    "normalized": {"normalization_rule_name": "nmt_nfkc"},
    "unigram": {"model_type": "unigram", "vocab_size": 60},
    "suffix": {"treat_whitespace_as_suffix": True, "eos_id": -1},
}  # fmt: skip


def trained(**options):
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=8)) for _ in range(400)]
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=made, minloglevel=2, hard_vocab_limit=False,
        **({"model_type": "bpe", "vocab_size": 380 if "byte_fallback" in options else 120}
           | options),
    )  # fmt: skip
    return made.getvalue()


@pytest.fixture(scope="module")
def model():
    return trained(**FORMS["llama"])


@pytest.fixture
def file(model, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_texts_are_those_of_the_library(form, tmp_path):
    content = trained(**FORMS[form])
    (tmp_path / "tokenizer.model").write_bytes(content)
    theirs = spm.SentencePieceProcessor(model_proto=content)
    mine = read_tokenizer(str(tmp_path))
    assert mine.vocab_size == theirs.vocab_size()
    assert mine.end == (None if form == "suffix" else theirs.eos_id())
    rng = random.Random(1)
    more = [" ".join(rng.choices([*WORDS, "foxes", "über", "lazier"], k=20)) for _ in range(200)]
    texts = [*TEXTS, *more, *(["x\n\n\ny <turn> z", "a    b"] if form == "gemma" else [])]
    for text in texts:
        ids = theirs.encode(text)
        found = mine.encode(text)
        assert np.issubdtype(found.dtype, np.unsignedinteger) and found.tolist() == ids, repr(text)
        assert mine.decode(found) == theirs.decode(ids), repr(text)
        if form in ("llama", "gemma") and "▁" not in text:
            assert mine.decode(found) == text
    assert mine.to_bytes() == content


def test_ids_that_no_text_has_decode_to_nothing(file):
    tokenizer = read_tokenizer(file)
    ids = [tokenizer.end, *tokenizer.encode("the fox").tolist(), 10**6, tokenizer.end]
    assert tokenizer.decode(ids) == "the fox"
    assert tokenizer.decode([]) == ""


def test_half_a_surrogate_pair_stops_nothing(file):
    tokenizer = read_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("content", [b"", b"\x0a\xff\xff", b"no model", None])
def test_what_is_no_model_is_said_to_be_none(content, model, tmp_path):
    (tmp_path / "x.model").write_bytes(model[: len(model) // 2] if content is None else content)
    with pytest.raises(jaxspeed.DataError, match=r"x\.model' is not a SentencePiece model"):
        read_tokenizer(str(tmp_path / "x.model"))


def test_without_the_library_the_extra_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    wanted = r"tokenizer\.model' needs .*: pip install 'jaxspeed\[sentencepiece\]'"
    with pytest.raises(jaxspeed.DataError, match=wanted):
        read_tokenizer(file)
    folders.folder(tmp_path, folders.LLAMA, folders.llama_tensors())
    with pytest.raises(jaxspeed.PretrainedError, match=wanted):
        from_pretrained(tmp_path)


def test_a_model_that_is_larger_than_the_vocabulary_is_refused(file, tmp_path):
    folders.folder(tmp_path, folders.LLAMA, folders.llama_tensors())
    with pytest.raises(jaxspeed.PretrainedError, match=r"has ids up to \d+, but vocab_size"):
        from_pretrained(tmp_path)


@pytest.fixture
def data(file, tmp_path):
    texts = text_files(tmp_path / "texts", [" ".join(WORDS)] * 40)
    return {"source": "text", "path": str(texts), "tokenizer": str(file)}


def test_a_folder_of_tokens_has_the_model(data, model, tmp_path):
    direct = opened(data)
    tokenize(jaxspeed.Config(data=data).data, tmp_path / "tokens")
    assert (tmp_path / "tokens" / "tokenizer.model").read_bytes() == model
    read = opened({"source": "tokens", "path": str(tmp_path / "tokens")})
    assert read.tokenizer.to_bytes() == model
    assert (read.train.batch(0, 8)["tokens"] == direct.train.batch(0, 8)["tokens"]).all()


def test_a_run_and_its_export_have_the_model(data, file, model, tmp_path, monkeypatch):
    class Begun(Exception):
        pass

    def no_engine(source, **_):
        raise Begun

    monkeypatch.setattr(Source, "engine", no_engine)
    sizes = small.CONFIG["model"]["config"] | {"vocab_size": 512}
    config = small.write(tmp_path, data=data, model={"config": sizes})
    source = source_of(config)
    with pytest.raises(Begun):
        open_run(source)
    before = source.corpus()
    source.folder.close()
    file.unlink()
    again = source_of(config).corpus()
    assert again.fingerprint == before.fingerprint and again.tokenizer.to_bytes() == model
    given = parser().parse_args(["checkpoint", "export", str(tmp_path / "run"), "out"])
    assert [path.name for path in _hf_form(given)[0].files if path.is_file()] == ["tokenizer.model"]
