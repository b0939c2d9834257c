"""What the docs list is what there is."""

import re
from pathlib import Path

import pytest

from jaxspeed.cli.main import COMMANDS
from jaxspeed.metrics import NAMES
from jaxspeed.objective.loss import OWN_METRICS

pytestmark = pytest.mark.fast

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_every_metric_is_listed_as_it_is():
    listed = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", (DOCS / "running.md").read_text(), re.M)
    metrics = {name: text for name, text in listed if name in NAMES}
    assert metrics == NAMES


def test_every_command_is_listed():
    text = (DOCS / "running.md").read_text()
    for command in COMMANDS:
        name = command.__name__.rsplit(".", 1)[1].replace("evaluate", "eval")
        assert f"`jaxspeed {name}" in text


def test_no_metric_of_a_loss_may_take_the_name_of_one_of_the_runs():
    assert {name for name in NAMES if "/" not in name} <= set(OWN_METRICS)
