"""Mistakes of users: what each says, and how soon (mistakes.yaml)."""

import pytest

from tests.cli.mistakes import faults, mistakes, outcomes

MISTAKES = mistakes()


@pytest.mark.full
def test_each_mistake_has_a_clear_message_in_time():
    wrong = {m.name: [*faults(m, done), done.text] for m, done in outcomes(MISTAKES)}
    assert {name: what for name, what in wrong.items() if len(what) > 1} == {}


def test_half_of_the_mistakes_are_from_public_trackers():
    assert len({m.name for m in MISTAKES}) == len(MISTAKES) == 128
    assert sum("#" in m.source for m in MISTAKES) == 64
