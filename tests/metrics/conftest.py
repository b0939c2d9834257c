"""A clock and a terminal to test what is shown with."""

import pytest

from tests.metrics.screen import Screen


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def screen(request, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "LINES"):
        monkeypatch.delenv(name, raising=False)
    columns = getattr(request, "param", 80)
    monkeypatch.setenv("COLUMNS", str(columns))  # Rich asks the real streams, which are pytest's
    return Screen(columns)
