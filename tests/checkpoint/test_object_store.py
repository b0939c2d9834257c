"""Buckets cannot rename: there a checkpoint is complete once its manifest, written last, exists."""

import importlib.util

import pytest
from etils import epath

import jaxspeed
from jaxspeed.checkpoint import Checkpointer, stores, verify
from jaxspeed.checkpoint.manifest import NAME
from jaxspeed.config import load_config
from jaxspeed.config.before_start import check_start
from tests.checkpoint import states


@pytest.fixture
def bucket(tmp_path):
    return stores.ObjectStore(epath.Path(tmp_path))


@pytest.fixture(scope="module")
def engine():
    return states.engine(stage=3)


def test_urls_are_buckets_and_paths_are_folders(tmp_path):
    assert isinstance(stores.store_at(tmp_path), stores.LocalStore)
    assert isinstance(stores.store_at("relative/path"), stores.LocalStore)
    assert isinstance(stores.store_at("s3://bucket/run"), stores.ObjectStore)
    with pytest.raises(jaxspeed.ConfigError, match="neither a folder nor a gs:// or s3:// URL"):
        stores.store_at("az://bucket/run")


def test_a_missing_package_of_a_bucket_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for url, name in (("s3://b/run", "s3fs"), ("gs://b/run", "gcsfs")):
        words = rf'needs {name}, which is not installed; pip install "jaxspeed\[{url[:2]}\]"'
        with pytest.raises(jaxspeed.ConfigError, match=f"^checkpoints: {words}"):
            stores.store_at(url)
        config = load_config({"run": {"checkpoints": url, "steps": 1}})
        with pytest.raises(jaxspeed.ConfigError, match=rf"^run\.checkpoints: {words}"):
            check_start(config)


def test_a_state_comes_back_from_a_bucket(engine, bucket):
    saver = Checkpointer(bucket, keep=1)
    for i in range(2):
        states.steps(engine, i, 1)
        saver.save(engine.program, engine.state, files={"a": b"1"})
    expected = states.held(engine)
    restored = saver.restore(engine.program)
    assert [info.tag for info in saver.list()] == [restored.tag]
    engine.state = restored.state
    states.assert_same(states.held(engine), expected)
    assert verify(bucket) == []


def test_nothing_is_ever_renamed_and_the_manifest_comes_last(engine, bucket, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a bucket cannot rename")

    order = []
    real = stores.manifest.write_file

    def write(path, content):
        order.append((path.name, {f.name for f in path.parent.iterdir()}))
        real(path, content)

    monkeypatch.setattr(type(epath.Path("x")), "rename", refuse)
    monkeypatch.setattr(type(epath.Path("x")), "replace", refuse)
    monkeypatch.setattr("jaxspeed.checkpoint.manifest.write_file", write)
    saver = Checkpointer(bucket)
    saver.save(engine.program, engine.state, tag="a")
    saver.close()
    name, there = order[-1]
    assert name == NAME and there >= {"arrays", "checkpoint.json"}


def test_what_has_no_manifest_is_partial_and_never_taken(engine, bucket):
    saver = Checkpointer(bucket)
    saver.save(engine.program, engine.state, tag="a")
    saver.save(engine.program, engine.state, tag="b")
    saver.wait()
    (bucket.root / "b" / NAME).unlink()
    assert {info.tag: info.ok for info in saver.list()} == {"a": True, "b": False}
    assert saver.restore(engine.program).tag == "a"
    with pytest.raises(jaxspeed.CheckpointError):
        saver.restore(engine.program, tag="b")
    saver.save(engine.program, engine.state, tag="b")
    saver.close()
    assert saver.restore(engine.program).tag == "b"
