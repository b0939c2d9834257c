"""The page of a plan in a real browser: headless Chromium, at the widths of a phone and a desk."""

import json
import re

import pytest

from jaxspeed.planner.page import page_of
from tests.planner import page_figures, page_read
from tests.planner.test_page import HOSTILE, on_tpu, piped
from tests.support.browser import Browser, chromium

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="needs a Chromium (apt install chromium, or CHROMIUM=...)"
)
WIDTHS = (390, 1280)
PLANS = {
    "gpus": page_figures.gpus,
    "torus": lambda: on_tpu("v5p:16x16x16", pipe=16, data=16, tensor=16),
    "pipeline": lambda: piped("interleaved", 8, 32, 2)[0],
}

# Every number that is shown, as the document has it after loading.
NUMBERS = """[...document.querySelectorAll("[data-at]")].map(e =>
  [e.textContent, e.dataset.at, e.dataset.how || "", e.dataset.form])"""
TREE = 'JSON.parse(document.getElementById("figures").textContent)'
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
