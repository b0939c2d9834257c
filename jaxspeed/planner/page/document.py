"""The HTML document: sections, style sheet, script and the embedded JSON figures."""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jaxspeed.planner.page.advice_section import advice
from jaxspeed.planner.page.communication_section import communication
from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.headline import headline, title_of
from jaxspeed.planner.page.markup import Markup, join, tag
from jaxspeed.planner.page.memory_section import memory
from jaxspeed.planner.page.mesh_section import mesh
from jaxspeed.planner.page.pipeline_section import pipeline
from jaxspeed.planner.page.search_section import search
from jaxspeed.planner.page.time_section import step_time

SECTIONS = {
    "advice": ("What would help", advice),
    "memory": ("Memory", memory),
    "time": ("Time", step_time),
    "exchanges": ("Communication", communication),
    "mesh": ("Mesh", mesh),
    "schedule": ("Schedule", pipeline),
    "search": ("Search", search),
}


def page_of(found: Mapping[str, Any]) -> str:
    """The page of a plan's figures, each number with its JSON pointer.

    Nothing is loaded, and the content security policy allows only the page's script, by its hash:
    names of models and files come from users.
    """
    text = json.dumps(found, default=str)
    figures = Figures(json.loads(text))
    drawn = {name: (title, draw(figures)) for name, (title, draw) in SECTIONS.items()}
    present = {name: each for name, each in drawn.items() if each[1] is not None}
    links = [tag("a", title, href=f"#{name}") for name, (title, _) in present.items()]
    style, script = _resource("page.css"), _resource("page.js")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title_of(figures)),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to content", href="#content", cls="skip"),
        tag(
            "nav",
            tag("span", "jaxspeed plan", cls="brand"),
            tag("span", links, cls="links"),
            tag("button", "light or dark", id="theme", type="button"),
            aria_label="sections",
        ),
        tag("main", headline(figures), [each for _, each in present.values()], id="content"),
        tag("footer", tag("p", "Every number is from ", tag("code", "jaxspeed plan --json"), FOOT)),
        tag("div", id="tip", role="status"),
        tag("script", Markup(_escaped(text)), type="application/json", id="figures"),
        tag("script", Markup(script)),
    )
    return "<!doctype html>\n" + tag("html", join(head, body), lang="en") + "\n"


FOOT = (
    ", which is embedded in this file. Bytes are per device, in powers of 1000. Figures that are "
    "not the compiler's are estimated from the traced step."
)


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    script_src, style_src = f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'"
    return f"default-src 'none'; img-src data:; {style_src}; {script_src}"


def _escaped(text: str) -> str:
    """JSON escaped so that it cannot close its script element."""
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
