"""Text has the ids that the library `sentencepiece` gives it, and comes back."""

import io
import random

import pytest

import jaxspeed
from jaxspeed.data.tokenizer import load_tokenizer, read_tokenizer

spm = pytest.importorskip("sentencepiece")
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


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_texts_are_those_of_the_library(form, tmp_path):
    content = trained(**FORMS[form])
    (tmp_path / "tokenizer.model").write_bytes(content)
    theirs = spm.SentencePieceProcessor(model_proto=content)
    mine = read_tokenizer(str(tmp_path))
    assert mine.vocab_size == theirs.vocab_size()
    assert mine.end == theirs.eos_id()
    rng = random.Random(1)
    more = [" ".join(rng.choices([*WORDS, "foxes", "über", "lazier"], k=20)) for _ in range(200)]
    texts = [*TEXTS, *more, *(["x\n\n\ny <turn> z", "a    b"] if form == "gemma" else [])]
    for text in texts:
        ids = theirs.encode(text)
        assert mine.encode(text).tolist() == ids, repr(text)
        if theirs.unk_id() not in ids:
            assert mine.decode(ids) == theirs.decode(ids), repr(text)
    again = load_tokenizer(mine.to_bytes())
    assert again.encode(texts[0]).tolist() == theirs.encode(texts[0])


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"model_type": "unigram", "vocab_size": 50}, "no byte-pair encoding"),
        ({"user_defined_symbols": ["<turn>"]}, "as '<turn>'"),
        ({"treat_whitespace_as_suffix": True}, "does not mark spaces before words"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(options, reason, tmp_path):
    (tmp_path / "x.model").write_bytes(trained(**options))
    with pytest.raises(jaxspeed.DataError, match=reason):
        read_tokenizer(str(tmp_path / "x.model"))
