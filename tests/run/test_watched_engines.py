"""Every engine attributes its calls to sections of the watchdog; the time between is the user's."""

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.run.watchdog import Watchdog
from tests.engine import tiny
from tests.parameter_server import serving

PIPELINE = {"mesh": {"pipe": 2, "data": 4}, "gradient_accumulation_steps": 2}
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
LANGUAGE = {
    "model": {"family": "gpt2", "config": {**TINY, "max_position_embeddings": 16, "dropout": 0.0}},
    "train_batch_size": 8,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def watched(engine):
    """The watchdog of an engine, and the sections that it enters."""
    dog = Watchdog(Config.load({"run": {"watchdog": {"enabled": True}}}).run.watchdog)
    sections, enter = [], dog.sections.enter

    def noted(name, step=None):
        sections.append(name)
        enter(name, step)

    dog.sections.enter = noted
    engine.watch_with(dog)
    return dog, sections


def trained(engine, dog, sections):
    """Two steps: the first one compiles."""
    batch = tiny.batch(engine.program.batch.train)
    for step in range(2):
        sections.clear()
        jax.block_until_ready(engine.train_batch(batch))
        assert sections == ["step", "compile"][: 2 - step]
        at = dog.sections.look()
        assert (at.section, at.step) == ("user_code", step + 1)
    sections.clear()
    jax.block_until_ready(engine.eval_batch(batch))
    assert sections == ["evaluate", "compile"] and dog.sections.look().section == "user_code"


def test_each_call_of_an_engine_has_its_section(tmp_path):
    engine = tiny.engine(stage=3)
    dog, sections = watched(engine)
    trained(engine, dog, sections)
    called = {
        "save_checkpoint": ("save", (tmp_path,)),
        "load_checkpoint": ("restore", (tmp_path,)),
        "wait": ("save", ()),
        "diagnose": ("evaluate", (tiny.batch(engine.program.batch.train),)),
        "reset": ("restore", ()),
        "close": ("save", ()),
    }
    for name, (section, given) in called.items():
        sections.clear()
        getattr(engine, name)(*given)
        assert sections == [section], name
        assert dog.sections.look().section == ("end" if name == "close" else "user_code")


@pytest.mark.parametrize(
    "built", [lambda: tiny.engine(**PIPELINE), serving.served], ids=["pipeline", "servers"]
)
def test_pipelines_and_parameter_servers_are_watched(built):
    engine = built()
    trained(engine, *watched(engine))
    engine.close()


def test_each_generated_token_is_progress():
    engine = jaxspeed.initialize(config=LANGUAGE, devices=jax.devices()[:1])
    dog, sections = watched(engine)
    drawn = engine.generate([[1, 2]], 3)  # in one segment
    assert sections == ["generate"] * 2 and dog.sections.look().section == "user_code"
    pieces = iter(engine.stream([[1, 2]], 3))
    sections.clear()
    first = next(pieces)
    assert sections == ["generate"] and dog.sections.look().section == "user_code"
    assert [first.token, *(piece.token for piece in pieces)][:3] == [*drawn[0].tokens]
    np.testing.assert_equal(sections, ["generate"] * 3)
    sections.clear()
    engine.rollout([[1, 2]], 3, segment=2)
    np.testing.assert_equal(sections, ["rollout"] * 3)  # its programs, and two segments


def test_a_batch_that_is_refused_leaves_the_time_to_the_user():
    engine = tiny.engine(stage=3)
    dog, _ = watched(engine)
    with pytest.raises(jaxspeed.BatchError):
        engine.train_batch(tiny.batch(3))
    at = dog.sections.look()
    assert (at.section, at.bound) == ("step", "user_code")
