"""The page of a plan: a template with the figures in it."""

import json
import re

import numpy as np
import pytest

from jaxspeed.hardware.targets import target_of
from jaxspeed.pipeline.schedule import schedule
from jaxspeed.planner.page import page_of
from jaxspeed.planner.time.torus import layout_of
from tests.planner import page_figures, page_read
from tests.planner.page_figures import AXES, HOSTILE, SCHEDULES

pytestmark = pytest.mark.fast


def test_the_figures_are_in_it_as_they_are():
    figures = page_figures.gpus()
    assert page_read.embedded(page_of(figures)) == figures


def test_what_python_and_json_spell_differently_is_the_same():
    figures = page_figures.gpus()
    figures["time"]["exchanges"][0]["axes"] = ("data",)
    assert page_of(figures) == page_of(json.loads(json.dumps(figures)))


def test_it_loads_nothing_and_lets_no_script_run_but_its_own():
    page = page_of(page_figures.gpus())
    assert not re.search(r"(?:src|href|action)=\"(?!#|data:)", page)
    assert "@import" not in page and not re.search(r"url\((?!['\"]?data:)", page)
    policy = next(
        e.attributes["content"]
        for e in page_read.elements(page)
        if e.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy


@pytest.mark.parametrize("name", [HOSTILE, "FIGURES", "SCRIPT-HASH", "<!--<script>"])
def test_names_that_are_markup_stay_text(name):
    plain, hostile = (page_of(page_figures.named(each)) for each in ("x", name))
    assert [e.name for e in page_read.elements(hostile)] == [
        e.name for e in page_read.elements(plain)
    ]
    assert page_read.embedded(hostile) == page_figures.named(name)


@pytest.mark.parametrize("name,stages,micro,chunks", SCHEDULES)
def test_the_runs_of_a_schedule_are_its_table(name, stages, micro, chunks):
    table = schedule(name, stages, micro, chunks)
    for way, work in (("forward", table.forward), ("backward", table.backward)):
        drawn = np.full((table.ticks, stages, 2), -1)
        for stage, runs in enumerate(table.runs()[way]):
            for tick, chunk, first, length in runs:
                for i in range(length):
                    drawn[tick + i, stage] = chunk, first + i
        assert (drawn[..., 1] == work.micro).all()
        assert (drawn[..., 0][work.busy] == work.chunk[work.busy]).all()


LINKS = {
    "v5p:16x16x16": ({"pipe": 16, "data": 16, "tensor": 16}, {"pipe": "z", "tensor": "x"}),
    "2x v5p:4x4x4": ({"replica": 2, "data": 64}, {"replica": "slice", "data": "xyz"}),
    "tpu7x:2x2x1": ({"data": 8}, {"data": ("x", "y", "core")}),
    "h100:64": ({"pipe": 4, "data": 16}, {"pipe": ("network",), "data": ("node", "network")}),
}


@pytest.mark.parametrize("target", LINKS)
def test_an_axis_lies_along_links_whose_sizes_multiply_to_its_own(target):
    mesh, along = LINKS[target]
    found = layout_of(target_of(target), {**dict.fromkeys(AXES, 1), **mesh})
    assert {axis: int(np.prod(list(links.values()))) for axis, links in found.items()} == mesh
    for axis, links in along.items():
        assert set(found[axis]) == ({links} if links == "slice" else set(links))
