"""The page of a plan in a real browser: headless Chromium, at the widths of a phone and a desk.

Its numbers are those of the JSON, and its drawings are of them.
"""

import json
import re

import numpy as np
import pytest

from jaxspeed.planner.page import page_of
from tests.planner import page_figures, page_read
from tests.planner.page_figures import HOSTILE, SCHEDULES, on_tpu, piped
from tests.support.browser import Browser, chromium

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="needs a Chromium (apt install chromium, or CHROMIUM=...)"
)
WIDTHS = (390, 1280)
PLANS = {
    "gpus": page_figures.gpus,
    "attention": page_figures.attending,
    "torus": lambda: on_tpu("v5p:16x16x16", pipe=16, data=16, tensor=16),
    "pipeline": lambda: piped("interleaved", 8, 32, 2)[0],
}

# Every number that is shown, as the document has it after loading.
NUMBERS = """[...document.querySelectorAll("[data-at]")].map(e =>
  [e.textContent, e.dataset.at, e.dataset.how || "", e.dataset.form])"""
TREE = 'JSON.parse(document.getElementById("figures").textContent)'
# Numbers of micro-batches that reach into the next one of their row.
OVERLAPPING = """[...document.querySelectorAll(".gantt g")].flatMap(stage => {
  const boxes = [...stage.querySelectorAll(".mb")].filter(e => e.checkVisibility())
    .map(e => e.getBoundingClientRect()).sort((a, b) => a.top - b.top || a.left - b.left);
  return boxes.filter((box, i) => boxes[i + 1]?.top === box.top && boxes[i + 1].left < box.right);
}).length"""
NUMBERED = "[...document.querySelectorAll('.gantt .mb')].filter(e => e.checkVisibility()).length"
# What reaches past the page, the widest first.
WIDE = """document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.querySelectorAll("body *")]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + "." + (e.className.baseVal ?? e.className)).slice(0, 9)"""
# What does not fit the box that it is in.
CUT_OFF = """[...document.querySelectorAll(".numbers > div, .card, .node, .verdict")]
  .filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"""
# Texts with too little contrast to what is behind them (WCAG 2.2, 1.4.3: 4.5 to 1).
FAINT = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const found = rgba(getComputedStyle(e).backgroundColor);
      if (found[3] > 200) return found;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const e = node.parentElement;
    if (!node.textContent.trim() || !e.checkVisibility() || e.closest("svg")) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.push(`${node.textContent.trim()}: ${ratio.toFixed(2)}`);
  }
  return faint;
})()"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture
def opened(browser, tmp_path):
    def opened(figures, **how):
        path = tmp_path / "plan.html"
        path.write_text(page_of(figures), "utf-8")
        return browser.open(path, **how)

    return opened


@pytest.fixture
def drawn(opened):
    """The elements of the page after its script ran."""

    def drawn(figures):
        page = opened(figures)
        assert page.said == []
        return page_read.elements(page.evaluate("document.documentElement.outerHTML"))

    return drawn


def shown(elements):
    """(text, places, how, form) of each number."""
    keys = ("data-at", "data-how", "data-form")
    return [
        (e.text, *(e.attributes.get(key, "") for key in keys))
        for e in elements
        if "data-at" in e.attributes
    ]


def sections(elements):
    return [e.attributes["id"] for e in elements if e.name == "section"]


@pytest.mark.default_cases("gpus-dark", "attention-dark", "torus-light")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("plan", PLANS)
def test_it_opens_at_a_phone_s_and_a_desk_s_width(opened, plan, dark):
    figures = PLANS[plan]()
    page = opened(figures, width=WIDTHS[0], dark=dark)
    for width in WIDTHS:
        page.size(width, 900)
        assert page.evaluate(WIDE) == []
        assert page.evaluate(CUT_OFF) == []
        assert page.evaluate(FAINT) == []
    assert page.said == []
    assert [address.split("/")[-1] for address in page.asked_for if "data:" not in address] == [
        "plan.html"
    ]
    assert page.evaluate(TREE) == json.loads(json.dumps(figures))
    numbers = page.evaluate(NUMBERS)
    assert len(numbers) > 50 and not page_read.wrong(numbers, figures)


@pytest.mark.parametrize("best", [True, False], ids=["a best one", "none fits"])
def test_the_headline_of_a_search_is_the_best_config_s(drawn, best):
    figures = page_figures.gpus()
    place = f"/search/candidates/{figures['search']['best']}"
    if not best:
        figures["search"]["best"] = None
    places = [places.split()[0] for _, places, *_ in shown(drawn(figures))]
    of_headline = places[: places.index("/memory/device") if best else 8]
    assert (f"{place}/seconds" in of_headline) == (f"{place}/mfu" in of_headline) == best
    assert (f"{place}/compiled/device_bytes" in of_headline) == best
    assert any(x.startswith(("/time/step", "/memory/device")) for x in of_headline) != best


def test_a_bad_page_fails_the_checks(browser, tmp_path):
    """The checks above can fail: a page that scrolls, is faint, complains and asks for more."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<main style='width:2000px;color:#aaa'>x<img src=x.png></main><script>no.x</script>"
    )
    page = browser.open(path)
    assert page.evaluate(WIDE) and page.evaluate(FAINT) and len(page.said) == 2
    assert any("x.png" in address for address in page.asked_for)


def test_names_that_are_markup_do_not_run(opened):
    page = opened(page_figures.named(HOSTILE))
    assert page.evaluate("window.ran") is None and page.said == []
    assert HOSTILE in page.evaluate("document.querySelector('h1').textContent")


def test_parts_are_reached_by_key_and_say_what_they_are(opened):
    page = opened(page_figures.gpus())
    reached = []
    for _ in range(60):
        for kind in ("keyDown", "keyUp"):
            page.ask("Input.dispatchKeyEvent", type=kind, key="Tab", windowsVirtualKeyCode=9)
        tip = page.evaluate("document.activeElement.dataset.tip || ''")
        if tip:
            seen = "getComputedStyle(tip).display == 'none' ? '' : tip.textContent"
            assert page.evaluate(f"(tip => {seen})(document.getElementById('tip'))") == tip
            reached.append(tip.splitlines()[0])
    assert {"saved activations", "compute"} <= set(reached), reached
    for kind in ("keyDown", "keyUp"):
        page.ask("Input.dispatchKeyEvent", type=kind, key="Escape", windowsVirtualKeyCode=27)
    assert page.evaluate("document.getElementById('tip').style.display") == "none"


def test_the_button_turns_the_colours_whatever_the_system_prefers(opened):
    page = opened(page_figures.gpus(), dark=True)
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.evaluate("document.getElementById('theme').click()")
    light = page.evaluate(paper)
    assert sum(map(int, re.findall(r"\d+", light))) > 600 > sum(map(int, re.findall(r"\d+", dark)))
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(paper) == dark


def test_on_paper_it_is_light_and_has_no_controls(opened):
    page = opened(page_figures.gpus(), dark=True)
    page.ask("Emulation.setEmulatedMedia", media="print")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", paper))) > 600
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.ask("Page.printToPDF")["data"]


@pytest.mark.parametrize("name,stages,micro,chunks", SCHEDULES)
def test_numbers_of_a_schedule_are_shown_where_they_have_room(opened, name, stages, micro, chunks):
    page = opened(piped(name, stages, micro, chunks)[0], width=1280)
    assert page.evaluate(NUMBERED) == 2 * stages * micro * chunks
    assert page.evaluate(OVERLAPPING) == 0
    page.size(390, 900)
    assert page.evaluate(OVERLAPPING) == 0
    assert (page.evaluate(NUMBERED) > 0) == (chunks == 1)  # three characters in 8 pixels
    page.evaluate("document.querySelectorAll('.gantt style').forEach(e => e.remove())")
    assert (page.evaluate(OVERLAPPING) > 0) == (chunks > 1)  # so the checks can fail


def test_without_scripts_it_says_where_the_figures_are(opened):
    note = "document.querySelector('noscript > p')"
    page = opened(page_figures.gpus(), scripts=False)
    assert "prints them as text" in page.evaluate(f"{note}.textContent")
    assert page.evaluate(f"{note}.getBoundingClientRect().height") > 10
    assert opened(page_figures.gpus()).evaluate(note) is None


FORMS = ("bytes", "bytes a second", "seconds", "count", "percent", "flops a second")
SIZES = (0, 4.21e-10, 0.0421, 0.9996, 1.0, 59.97, 119.9, 999.4, 999.6, 123456.0, 7.77e8, 2e13)


def test_a_number_reads_as_what_it_is(opened):
    page = opened(page_figures.gpus())
    assert page.evaluate("Object.keys(FORMS).sort()") == sorted(FORMS)
    for form in FORMS:
        for size in SIZES:
            text = page.evaluate(f"FORMS[{form!r}]({size})")
            if text in ("<1 ns", "<0.1%"):
                assert size < {"seconds": 1e-9, "percent": 0.0005}[form]
                continue
            near = 0.00051 if form == "percent" else 0.0051 * size
            value = page_read.value_of(text, form)
            assert abs(value - size) <= max(near, 0.0051 * size), (text, size)


def test_another_figure_changes_the_number_that_shows_it(drawn):
    """The checks of numbers can fail: a page held against other figures does not agree."""
    figures = page_figures.gpus()
    numbers = shown(drawn(figures))
    assert len(numbers) > 300 and not page_read.wrong(numbers, figures)
    figures["memory"]["device"] += 10**9
    assert any("/memory/device)" in each for each in page_read.wrong(numbers, figures))


@pytest.mark.default_cases("time", "search", "advice", "target")
@pytest.mark.parametrize("missing", ["memory", "time", "search", "advice", "target"])
def test_a_part_without_figures_is_left_out(drawn, missing):
    all_sections = ["advice", "memory", "time", "exchanges", "mesh", "search"]
    gone = {"time": {"time", "exchanges"}, "target": {"mesh"}}.get(missing, {missing})
    if missing == "target":  # without devices to hold it against there is no estimate either
        found = page_figures.without("target", "memory")
        gone = {"mesh", "memory"}
    else:
        found = page_figures.without(missing)
    assert sections(drawn(found)) == [name for name in all_sections if name not in gone]
    if missing == "memory":
        assert sections(drawn(page_figures.gpus())) == all_sections


def test_bars_are_as_long_as_their_bytes(drawn):
    figures = page_figures.gpus()
    device = [each for each in figures["memory"]["components"] if not each["host"]]
    figures["memory"]["components"] = device
    parts = [e for e in drawn(figures) if "part" in e.looks]
    widths = {
        e.attributes["aria-label"].split(":")[0]: re.search(r"width:(.+)%", e.attributes["style"])
        for e in parts
    }
    scale = sum(each["bytes"] for each in device)  # which is more than N
    for each in device:
        if each["bytes"] > scale / 1000:
            share = 100 * each["bytes"] / scale
            assert float(widths[each["name"]][1]) == pytest.approx(share, abs=0.01)


def test_memory_over_the_limit_is_marked(drawn):
    over = [e for e in drawn(page_figures.without("search")) if "over" in e.looks]
    assert len(over) == 2  # in the headline and in the memory
    fits = page_figures.gpus()
    fits["target"]["memory"] *= 2
    assert not [e for e in drawn(fits) if "over" in e.looks]


VERDICTS = {
    "estimate": ("fits", None, "Expected to fit"),
    "tight": ("tight", None, "Tight"),
    "not": ("does not fit", None, "Not expected to fit"),
    "compiled": ("tight", (60e9, 0, True), "Fits"),
    "refused": ("fits", (None, 0, False), "Does not fit"),
    "host": ("fits", (60e9, 300e9, False), "Does not fit in host memory"),
}


@pytest.mark.default_cases("tight", "not", "refused", "host")
@pytest.mark.parametrize("name", VERDICTS)
def test_the_headline_has_the_compilers_verdict_if_it_ran(drawn, name):
    verdict, outcome, says = VERDICTS[name]
    figures = page_figures.without("search")
    figures["memory"]["verdict"] = verdict
    if outcome:
        needs, host, fits = outcome
        figures["outcome"] = {
            "fits": fits,
            "device_bytes": needs,
            "host_bytes": host,
            "refused": None if needs else "no room",
            "seconds": 12.0,
        }
    words = [e for e in drawn(figures) if "words" in e.looks]
    assert [e.text.lstrip("✓!✕") for e in words] == [says]


def test_compiled_figures_are_shown_by_kind_and_axis(drawn):
    figures = page_figures.gpus()
    sent = [("all-gather", ["data"], 10**8, 12), ("all-gather", ["data"], 10**7, 2)]
    sent += [("all-reduce", ["data", "tensor"], 10**6, 2)]
    figures["compiled"] = {
        "argument_bytes": 30e9,
        "temp_bytes": 25e9,
        "output_bytes": 31e9,
        "alias_bytes": 26e9,
        "collectives": [dict(zip(("kind", "axis", "bytes", "runs"), each)) for each in sent],
    }
    figures["outcome"] = {"fits": True, "device_bytes": 60e9, "host_bytes": 0, "seconds": 12.0}
    found = drawn(figures)
    assert not page_read.wrong(shown(found), figures)
    rows = [e.text for e in found if e.name == "tr" and e.text.startswith("all-")]
    assert rows[-2:] == ["all-gatherdata1.22 GB14", "all-reducedatatensor2 MB2"]
    parts = {e.attributes["aria-label"] for e in found if "part" in e.looks}
    assert "outputs: 5 GB\nthat do not alias an argument" in parts


@pytest.mark.parametrize("name,stages,micro,chunks", SCHEDULES)
def test_the_chart_has_a_cell_for_each_piece_of_work_at_its_tick(
    drawn, name, stages, micro, chunks
):
    figures, table = piped(name, stages, micro, chunks)
    found = drawn(figures)
    assert not page_read.wrong(shown(found), figures)
    for way, work in (("forward", table.forward), ("backward", table.backward)):
        cells = [
            round(float(e.attributes["x"].rstrip("%")) / 100 * table.ticks)
            for e in found
            if e.name == "rect" and way in e.looks
        ]
        assert sorted(cells) == sorted(np.nonzero(work.busy)[0].tolist())


def test_of_many_stages_the_first_and_the_last_are_drawn(drawn):
    figures, _ = piped(stages=64, micro=128)
    tips = [e.attributes["data-tip"] for e in drawn(figures) if "data-tip" in e.attributes]
    stages = [tip.splitlines()[0] for tip in tips if tip.startswith("stage ")]
    assert stages[0] == "stage 0" and stages[-1] == "stage 63" and len(stages) < 64


LAID_OUT = {
    "v5p:16x16x16": ({"pipe": 16, "data": 16, "tensor": 16}, 3),
    "v5p:2x2x2": ({"data": 8}, 0),
    "v5e:16x16": ({"data": 256}, 2),
    "2x v5p:4x4x4": ({"replica": 2, "data": 64}, 3),
}


@pytest.mark.parametrize("target", LAID_OUT)
def test_a_torus_is_drawn_with_its_rings(drawn, target):
    mesh, rings = LAID_OUT[target]
    figures = on_tpu(target, **mesh)
    found = drawn(figures)
    assert not page_read.wrong(shown(found), figures)
    assert len([e for e in found if "wrap" in e.looks]) == rings
    chips = len([e for e in found if "chip" in e.looks])
    assert 0 < chips <= 40 and (chips == 8 or target != "v5p:2x2x2")


@pytest.mark.parametrize("count,boxes", [(8, 1), (32, 4), (1024, 5)])
def test_of_many_nodes_a_few_are_drawn(drawn, count, boxes):
    figures = page_figures.gpus()
    figures["target"]["count"] = figures["devices"]["count"] = count
    found = drawn(figures)
    assert len([e for e in found if "node" in e.looks]) == boxes
    assert len([e for e in found if "device" in e.looks]) == 8 * boxes


def test_attention_is_shown_with_its_kind_and_the_reason(drawn):
    figures = page_figures.attending()
    elements = drawn(figures)
    rows = [e.text for e in elements if e.name == "tr"]
    for run in figures["attention"]["runs"]:
        (row,) = [text for text in rows if run["why"] in text]
        assert all(str(run[part] or "") in row for part in ("kind", "layers", "order", "shapes"))


def test_the_search_has_a_point_for_each_candidate_and_marks_the_best(drawn):
    figures = page_figures.gpus()
    found = drawn(figures)
    points = [e for e in found if "point" in e.looks and "cx" in e.attributes]
    candidates = figures["search"]["candidates"]
    assert len(points) == len(candidates) + 3  # of the legend
    rings = [e for e in found if "ring" in e.looks]
    best = [e for e in found if e.name == "tr" and "best" in e.looks]
    assert len(rings) == 2 and len(best) == 1
    assert candidates[figures["search"]["best"]]["name"] in best[0].text
    rows = [e for e in found if e.name == "tr" and "tokens/s" not in e.text and "MFU" not in e.text]
    for each in candidates:
        if each["lost"]:
            assert any(each["name"] in row.text and each["lost"] in row.text for row in rows)
    assert any("compiled: 69 GB, fits" in row.text for row in rows)


def test_a_search_without_a_best_says_so(drawn):
    figures = page_figures.gpus()
    figures["search"]["best"] = None
    found = drawn(figures)
    assert any("None of them fits." in e.text for e in found if e.name == "section")
    assert not page_read.wrong(shown(found), figures)
