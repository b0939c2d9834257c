"""Mistakes of users: what each says, and how soon (mistakes.yaml)."""

import pytest

from tests.cli.mistakes import faults, made_together, mistakes, outcomes, shared_files

pytestmark = pytest.mark.fast

MISTAKES = mistakes()


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "shared").mkdir()
    return shared_files(tmp_path / "shared", runs=False)


def test_half_of_the_mistakes_are_from_public_trackers():
    assert len({m.name for m in MISTAKES}) == len(MISTAKES) == 128
    assert sum("#" in m.source for m in MISTAKES) == 64


def test_mistakes_in_flags_and_configs_are_clear_and_found_without_jax(shared, tmp_path):
    assert made_together("flags", shared, tmp_path) == {}


@pytest.mark.sampled
@pytest.mark.parametrize("within", ["files", "trace"])
def test_other_mistakes_are_clear(within, tmp_path):
    (tmp_path / "shared").mkdir()
    assert made_together(within, shared_files(tmp_path / "shared"), tmp_path) == {}


@pytest.mark.full
def test_each_mistake_has_a_clear_message_in_time():
    wrong = {m.name: [*faults(m, done), done.text] for m, done in outcomes(MISTAKES)}
    assert {name: what for name, what in wrong.items() if len(what) > 1} == {}
