"""Configs, folders and data with random mutations: each works, or is one error of ours, at once."""

import functools
import gzip
import json
import random
import shutil
import time

import jax
import numpy as np
import pytest
import yaml
from jaxspeed.models import from_pretrained

from jaxspeed.config.config import load_config
from jaxspeed.config.run_sections import SourceSection
from jaxspeed.data import ByteTokenizer, token_store
from jaxspeed.data.open_source import open_source
from jaxspeed.data.tokenizer import read_tokenizer
from jaxspeed.errors import JaxspeedError
from jaxspeed.run import source_of
from jaxspeed.train import build_program
from jaxspeed.user_models import adapt_model
from jaxspeed.user_models.config_model import resolve_model
from tests.interop import folders
from tests.run import small
from tests.support.covering import covering
from tests.support.mutations import mutated, mutated_bytes

SEEDS = covering(range(300), range(40))


def outcome(call, most=5):
    """Its result, or None if it is refused; any error but ours fails the test by itself.

    It takes `most` seconds of the processor at most.
    """
    begun = time.process_time()
    try:
        return call()
    except JaxspeedError as error:
        assert 10 < len(str(error)) < 20_000 and "Traceback" not in str(error)
        return None
    finally:
        assert time.process_time() - begun < most, "a hang"


# -- configs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config whose run takes seconds, with keys of most sections."""
    given = json.loads(small.write(tmp_path_factory.mktemp("config")).read_text())
    given["data"] |= {"seed": 3, "shuffle": True, "document_masks": False, "text_field": "text"}
    given["optimizer"]["params"] |= {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    params = {"total_num_steps": 20, "warmup_num_steps": 2, "warmup_type": "linear"}
    given |= {
        "scheduler": {"type": "WarmupDecayLR", "params": params},
        "gradient_clipping": 1.0,
        "mesh": {"data": 8},
        "activation_checkpointing": {"partition_activations": False},
    }
    return given


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_config_is_read_and_traced_or_refused(config, tmp_path, monkeypatch, seed):
    """As a tree, or as the text of a file; what is accepted is traced with its data."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    given = mutated(config, rng)
    if seed % 4 == 3:
        form, write = rng.choice([("json", json.dumps), ("yaml", yaml.safe_dump)])
        file = tmp_path / f"config.{form}"
        file.write_bytes(mutated_bytes(write(config).encode(), rng))
        given = file
    if outcome(lambda: load_config(given)) is None:
        return
    source = outcome(lambda: source_of(given))
    corpus = source and outcome(source.corpus)
    if corpus:
        outcome(lambda: traced(source, corpus), most=30)  # of a sound config: seconds


def traced(source, corpus):
    loaded = source.config
    program = build_program(loaded, *resolve_model(loaded, source.model, source.loss_fn))
    size = source.batch_size()
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), corpus.train.batch(0, 8)
    )
    return program.step.trace(program.state, program.abstract_batch(batch))


# -- folders and data ----------------------------------------------------------------------------


def hugging_face(folder):
    folders.folder(folder, folders.LLAMA, folders.llama_tensors(), files=2)
    vocab = {f"t{i}": i for i in range(folders.VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


def read_hugging_face(folder):
    model = from_pretrained(folder)
    leaves = adapt_model(model, model.loss).leaves
    model.weights.check({leaf.path: leaf.shape for leaf in leaves})
    for leaf in leaves:
        index = tuple(slice(0, n) for n in leaf.shape)
        model.weights.read(leaf.path, index, np.float32)
    return model


def tokens(folder):
    documents = [np.arange(1, 40, dtype=np.uint8)] * 5
    token_store.write(folder, "numbers", documents, ByteTokenizer())


def lines(folder):
    folder.mkdir()
    text = "".join(json.dumps({"text": f"line {i} of some", "n": [i]}) + "\n" for i in range(40))
    (folder / "a.jsonl").write_text(text)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def tokenizer(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(ByteTokenizer().to_bytes())


def images(folder):
    folder.mkdir()
    np.save(folder / "images.npy", np.zeros((6, 4, 4, 1), np.uint8))
    np.save(folder / "labels.npy", np.arange(6))


def read_source(kind, folder):
    from jaxspeed.data.model_limits import ModelLimits

    opened = open_source(SourceSection(source=kind, path=str(folder)), ModelLimits())
    return opened if kind in ("tokens", "images") else list(opened)


def read_words(folder):
    found = read_tokenizer(folder)
    return found.decode(found.encode("hello world, 123 äöü"))


KINDS = {
    "hugging face": (hugging_face, read_hugging_face),
    "tokens": (tokens, functools.partial(read_source, "tokens")),
    "lines": (lines, functools.partial(read_source, "jsonl")),
    "tokenizer": (tokenizer, read_words),
    "images": (images, functools.partial(read_source, "images")),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    for name, (make, read) in KINDS.items():
        make(folder / name)
        read(folder / name)
    return folder


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_folder_is_read_or_refused(sound, tmp_path, seed):
    """A file's bytes, or its JSON as a tree."""
    rng = random.Random(seed)
    name = rng.choice(["hugging face", *KINDS])
    folder = tmp_path / name
    shutil.copytree(sound / name, folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    file = rng.choice([*files, *(file for file in files if file.suffix == ".json")])
    if file.suffix == ".json" and rng.random() < 0.7:
        file.write_text(json.dumps(mutated(json.loads(file.read_text()), rng)))
    else:
        file.write_bytes(mutated_bytes(file.read_bytes(), rng))
    outcome(lambda: KINDS[name][1](folder))
