"""The list of names is what the parts of a run really say."""

import re

import pytest

from jaxspeed.metrics import NAMES, PHASES
from tests.engine import tiny


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_every_metric_of_the_engine_s_step_is_named(optimizer):
    engine = tiny.engine(tiny.PAIR, optimizer={"type": optimizer, "params": {"lr": 0.01}})
    assert set(engine.train_batch(tiny.batch())) <= set(NAMES)


def test_every_phase_of_the_wall_time_is_named():
    assert {f"wall/{phase}" for phase in PHASES} <= set(NAMES)


def test_names_are_words_that_every_sink_can_carry_and_each_is_explained():
    for name, meaning in NAMES.items():
        assert re.fullmatch(r"[a-z_]+(/[a-z_]+)?", name)
        assert len(meaning.split()) > 2 and not meaning.endswith(".")
    files = [name.replace("/", "_") for name in NAMES]
    assert len(set(files)) == len(files)
