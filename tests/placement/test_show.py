"""The printed placement table."""

import re

import pytest

from jaxspeed.placement.show import as_text
from tests.engine import tiny


def shown(width=80, **config):
    return as_text(tiny.engine(**config).placements, width)


@pytest.mark.parametrize(
    ("stage", "columns"),
    [(0, "param, grad, opt"), (1, "param, grad   opt"), (2, "param      grad, opt")],
)
def test_roles_with_equal_placements_share_a_column(stage, columns):
    header = next(line for line in shown(stage=stage).splitlines() if "parameter " in line)
    assert re.search(columns.replace("  ", " +"), header)


def test_a_role_without_placements_has_no_column():
    assert "master" not in shown(stage=3)
    assert "master" in shown(stage=3, bf16={"enabled": True})


def test_a_note_that_several_parameters_share_is_printed_once():
    zero = {"stage": 3, "stage3_param_persistence_threshold": 200}
    text = as_text(
        tiny.jaxspeed.initialize(
            tiny.Listed, tiny.squared_error, {**tiny.config(3), "zero_optimization": zero}
        ).placements,
        80,
    )
    assert text.count("fewer than 200 elements") == 1
    marked = [line for line in text.splitlines() if line.rstrip().endswith("(1)")]
    assert len(marked) > 1 and all("replicated" in line for line in marked)


def test_no_line_of_a_small_model_is_broken_at_80_columns():
    lines = shown(stage=3).splitlines()
    parameters = tiny.engine(stage=3).placements.rows
    assert all(sum(line.split()[:1] == [path] for line in lines) == 1 for path in parameters)
