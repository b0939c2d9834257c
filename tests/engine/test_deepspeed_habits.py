"""Calls as in DeepSpeed give an error with the lines to write; these lines run."""

import argparse
import copy
import re

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.deepspeed_habits import ARGUMENTS, METHODS
from jaxspeed.errors import JaxspeedError
from tests.engine import tiny


@pytest.fixture(scope="module")
def engine():
    return tiny.engine()


def lines(caught):
    """The lines to write, of an error."""
    found = re.findall(r"^    (.*)$", str(caught.value), re.M)
    assert len(found) == 2 and "docs/from-deepspeed.md" in str(caught.value)
    return found


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_deepspeeds_initialize_is_explained(name):
    with pytest.raises(
        JaxspeedError, match=rf"initialize\({name}=\.\.\.\) is DeepSpeed's"
    ) as caught:
        jaxspeed.initialize(model=tiny.Listed, **{name: {}})
    first, _ = lines(caught)
    assert "jaxspeed.initialize(model, loss_fn, config" in first or "optax" in first


def test_its_first_argument_is_explained():
    with pytest.raises(JaxspeedError, match=r"initialize\(args=\.\.\.\)"):
        jaxspeed.initialize(argparse.Namespace(deepspeed_config="ds.json"), tiny.Listed)


def test_another_argument_is_pythons_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'optimiser'"):
        jaxspeed.initialize(tiny.Listed, tiny.squared_error, tiny.config(), optimiser=None)


CALLS = {
    "a call": (lambda engine: engine(tiny.batch()), r"engine\(batch\)"),
    "a loss": (lambda engine: engine.backward(1.0), r"engine\.backward"),
    "a step": (lambda engine: engine.step(), r"engine\.step\(\)"),
    "four results": (lambda engine: [*engine], r"engine, optimizer, .* = initialize\(\.\.\.\)"),
    **{
        name: (lambda engine, name=name: getattr(engine, name)(), rf"engine\.{name}")
        for name in METHODS
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_deepspeeds_engine_is_explained(name, engine):
    call, start = CALLS[name]
    with pytest.raises(JaxspeedError, match=f"^{start} is DeepSpeed's; here ") as caught:
        call(engine)
    assert any("engine." in line or "jaxspeed.initialize" in line for line in lines(caught))


def test_the_lines_run(engine, tmp_path, monkeypatch):
    """All of them, with names as the lines have them."""
    monkeypatch.chdir(tmp_path)
    found = []
    for call, _ in CALLS.values():
        with pytest.raises(JaxspeedError) as caught:
            call(engine)
        found += lines(caught)
    ours = [line for line in found if "initialize" not in line and "pretrained" not in line]
    batch = tiny.batch()
    names = {"engine": engine, "batch": batch, "x": batch["x"], "jax": jax}
    for line in ours:
        exec(line, names)
        if "engine.step(" in line:  # donates the state
            engine.state = names["state"]
    engine.wait()
    assert np.isfinite(names["norm"]) and names["outputs"].shape == (len(batch["x"]), 1)


def test_what_deepspeed_has_is_absent_for_those_who_ask(engine):
    assert not hasattr(engine, "backward") and not hasattr(engine, "zero_grad")
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'frobnicate'"):
        engine.frobnicate  # noqa: B018
    assert copy.copy(engine).program is engine.program


def test_an_error_of_a_property_is_its_own(monkeypatch):
    engine = tiny.engine()
    monkeypatch.setattr(type(engine), "gather_once", property(lambda self: self.program.nothing))
    with pytest.raises(AttributeError, match="nothing"):
        engine.gather_once  # noqa: B018
