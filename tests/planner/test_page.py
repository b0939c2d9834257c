"""The page of a plan: its numbers are those of the JSON, and nothing else is needed to see it."""

import json
import re

import numpy as np
import pytest

from jaxspeed.hardware.targets import target_of
from jaxspeed.pipeline.schedule import schedule
from jaxspeed.planner.page import page_of
from jaxspeed.planner.page.figures import FORMS
from jaxspeed.planner.time.torus import layout_of
from tests.planner import page_figures, page_read

pytestmark = pytest.mark.fast

AXES = ("pipe", "replica", "data", "seq", "expert", "tensor")


def shown(page):
    return [
        (
            e.text,
            e.attributes["data-at"],
            e.attributes.get("data-how", ""),
            e.attributes["data-form"],
        )
        for e in page_read.elements(page)
        if "data-at" in e.attributes
    ]


def sections(page):
    return [e.attributes["id"] for e in page_read.elements(page) if e.name == "section"]


def on_tpu(target="v5p:16x16x16", **mesh):
    """Figures of a plan for a torus."""
    found, where = page_figures.gpus(), target_of(target)
    sizes = {**dict.fromkeys(AXES, 1), **mesh}
    found["mesh"] = sizes
    found["target"] |= {
        "name": target,
        "count": where.count,
        "topology": list(where.topology),
        "slices": where.slices,
        "wraps": list(where.wraps),
        "layout": layout_of(where, sizes),
    }
    found["devices"] |= {"count": where.count, "platform": "tpu"}
    return found


def piped(name="1f1b", stages=4, micro=8, chunks=1):
    found, table = page_figures.gpus(), schedule(name, stages, micro, chunks)
    names = ("live_bytes", "forward_bytes", "backward_bytes", "message_bytes", "shared_bytes")
    found["pipeline"] = {
        "schedule": name,
        "stages": stages,
        "chunks": chunks,
        "micro_batches": micro,
        "ticks": table.ticks,
        "bubble": table.bubble,
        "live_inputs": table.live_inputs,
        "layers_of_a_chunk": 2,
        **{key: 1000 * i for i, key in enumerate(names, start=1)},
        "work": table.runs(),
    }
    return found, table


def test_its_numbers_are_those_of_the_figures_inside_of_it():
    figures = page_figures.gpus()
    page = page_of(figures)
    assert page_read.embedded(page) == figures
    numbers = shown(page)
    assert len(numbers) > 300 and not page_read.wrong(numbers, figures)


def test_another_figure_changes_the_number_that_shows_it():
    """The check above can fail: a page held against other figures does not agree."""
    figures = page_figures.gpus()
    numbers = shown(page_of(figures))
    figures["memory"]["device"] += 10**9
    assert any("/memory/device)" in each for each in page_read.wrong(numbers, figures))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0.0421, 0.9996, 1.0, 59.97, 999.4, 999.6, 123456.0, 7.77e8, 2e13])
def test_a_number_reads_as_what_it_is(form, size):
    text = FORMS[form](size)
    near = 0.00051 if form == "percent" else 0.0051 * size
    assert abs(page_read.value_of(text, form) - size) <= max(near, 0.0051 * size), text


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


HOSTILE = "</script><script>window.ran = 1</script><img src=x onerror='window.ran=1'>\"&"


def test_names_that_are_markup_stay_text():
    plain, hostile = (
        page_read.elements(page_of(page_figures.named(name))) for name in ("x", HOSTILE)
    )
    assert [e.name for e in hostile] == [e.name for e in plain]
    assert any(HOSTILE in e.text for e in hostile if e.name == "h1")
    assert not any(key.startswith("on") for e in hostile for key in e.attributes)


@pytest.mark.parametrize("missing", ["memory", "time", "search", "advice", "target"])
def test_a_part_without_figures_is_left_out(missing):
    all_sections = ["advice", "memory", "time", "exchanges", "mesh", "search"]
    assert sections(page_of(page_figures.gpus())) == all_sections
    gone = {"time": {"time", "exchanges"}, "target": {"mesh"}}.get(missing, {missing})
    if missing == "target":  # without devices to hold it against there is no estimate either
        found = page_figures.without("target", "memory")
        gone = {"mesh", "memory"}
    else:
        found = page_figures.without(missing)
    assert sections(page_of(found)) == [name for name in all_sections if name not in gone]


def test_bars_are_as_long_as_their_bytes():
    figures = page_figures.gpus()
    device = [each for each in figures["memory"]["components"] if not each["host"]]
    figures["memory"]["components"] = device
    parts = [e for e in page_read.elements(page_of(figures)) if "part" in e.looks]
    widths = {
        e.attributes["aria-label"].split(":")[0]: re.search(r"width:(.+)%", e.attributes["style"])
        for e in parts
    }
    scale = sum(each["bytes"] for each in device)  # which is more than N
    for each in device:
        if each["bytes"] > scale / 1000:
            share = 100 * each["bytes"] / scale
            assert float(widths[each["name"]][1]) == pytest.approx(share, abs=0.01)


def test_memory_over_the_limit_is_marked():
    over = [e for e in page_read.elements(page_of(page_figures.gpus())) if "over" in e.looks]
    assert len(over) == 2  # in the headline and in the memory
    fits = page_figures.gpus()
    fits["target"]["memory"] *= 2
    assert not [e for e in page_read.elements(page_of(fits)) if "over" in e.looks]


VERDICTS = {
    "estimate": ({"memory": "fits"}, None, "Expected to fit"),
    "tight": ({"memory": "tight"}, None, "Tight"),
    "not": ({"memory": "does not fit"}, None, "Not expected to fit"),
    "compiled": ({"memory": "tight"}, (60e9, 0, True), "Fits"),
    "refused": ({"memory": "fits"}, (None, 0, False), "Does not fit"),
    "host": ({"memory": "fits"}, (60e9, 300e9, False), "Does not fit in host memory"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_headline_has_the_compilers_verdict_if_it_ran(name):
    memory, outcome, says = VERDICTS[name]
    figures = page_figures.gpus()
    figures["memory"]["verdict"] = memory["memory"]
    if outcome:
        needs, host, fits = outcome
        figures["outcome"] = {
            "fits": fits,
            "device_bytes": needs,
            "host_bytes": host,
            "refused": None if needs else "no room",
            "seconds": 12.0,
        }
    words = [e for e in page_read.elements(page_of(figures)) if "words" in e.looks]
    assert [e.text.lstrip("✓!✕") for e in words] == [says]


SCHEDULES = [("1f1b", 4, 8, 1), ("gpipe", 3, 5, 1), ("interleaved", 4, 8, 3)]


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


@pytest.mark.parametrize("name,stages,micro,chunks", SCHEDULES)
def test_the_chart_has_a_cell_for_each_piece_of_work_at_its_tick(name, stages, micro, chunks):
    figures, table = piped(name, stages, micro, chunks)
    page = page_of(figures)
    assert not page_read.wrong(shown(page), figures)
    for way, work in (("f", table.forward), ("b", table.backward)):
        cells = [
            round(float(e.attributes["x"].rstrip("%")) / 100 * table.ticks)
            for e in page_read.elements(page)
            if e.name == "rect" and re.fullmatch(rf"{way}\d", e.attributes.get("class", ""))
        ]
        assert sorted(cells) == sorted(np.nonzero(work.busy)[0].tolist())


def test_of_many_stages_the_first_and_the_last_are_drawn():
    figures, _ = piped(stages=64, micro=128)
    rows = [
        e
        for e in page_read.elements(page_of(figures))
        if e.name == "g" and "data-tip" in e.attributes
    ]
    memory = [
        e.attributes["data-tip"].splitlines()[0]
        for e in rows
        if "stage" in e.attributes["data-tip"]
    ]
    assert memory[0] == "stage 0" and memory[-1] == "stage 63" and len(memory) < 64


LAID_OUT = {
    "v5p:16x16x16": ({"pipe": 16, "data": 16, "tensor": 16}, 3),
    "v5p:2x2x2": ({"data": 8}, 0),
    "v5e:16x16": ({"data": 256}, 2),
    "2x v5p:4x4x4": ({"replica": 2, "data": 64}, 3),
}


@pytest.mark.parametrize("target", LAID_OUT)
def test_a_torus_is_drawn_with_its_rings(target):
    mesh, rings = LAID_OUT[target]
    figures = on_tpu(target, **mesh)
    page = page_of(figures)
    assert not page_read.wrong(shown(page), figures)
    found = page_read.elements(page)
    assert len([e for e in found if "wrap" in e.looks]) == rings
    chips = len([e for e in found if "chip" in e.looks])
    assert 0 < chips <= 40 and (chips == 8 or target != "v5p:2x2x2")


@pytest.mark.parametrize("count,boxes", [(8, 1), (32, 4), (1024, 5)])
def test_of_many_nodes_a_few_are_drawn(count, boxes):
    figures = page_figures.gpus()
    figures["target"]["count"] = figures["devices"]["count"] = count
    found = page_read.elements(page_of(figures))
    assert len([e for e in found if "node" in e.looks]) == boxes
    assert len([e for e in found if "device" in e.looks]) == 8 * boxes


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


def test_the_search_has_a_point_for_each_candidate_and_marks_the_best():
    figures = page_figures.gpus()
    found = page_read.elements(page_of(figures))
    points = [e for e in found if "point" in e.looks and "cx" in e.attributes]
    count = len(figures["search"]["candidates"])
    assert len(points) == count + 3  # of the legend
    rings = [e for e in found if "ring" in e.looks]
    best = [e for e in found if e.name == "tr" and "best" in e.looks]
    assert len(rings) == 2 and len(best) == 1
    assert figures["search"]["candidates"][figures["search"]["best"]]["name"] in best[0].text
    rows = [e for e in found if e.name == "tr" and "tokens/s" not in e.text and "MFU" not in e.text]
    for each in figures["search"]["candidates"]:
        if each["lost"]:
            assert any(each["name"] in row.text and each["lost"] in row.text for row in rows)


def test_a_search_without_a_best_says_so():
    figures = page_figures.gpus()
    figures["search"]["best"] = None
    page = page_of(figures)
    assert "None of them fits." in page and not page_read.wrong(shown(page), figures)


def test_what_python_and_json_spell_differently_is_the_same():
    figures = page_figures.gpus()
    figures["time"]["exchanges"][0]["axes"] = ("data",)
    assert page_of(figures) == page_of(json.loads(json.dumps(figures)))
