"""The time of a step as one bar: what the device is busy with, and what it waits for."""

from jaxspeed.planner.page.bars import Bar, Part, stacked
from jaxspeed.planner.page.figures import FORMS, Figures, Place, percent_text
from jaxspeed.planner.page.looks import TIME
from jaxspeed.planner.page.markup import Children, Markup, section, table, tag

SAYS = {
    "compute": "products, at what the chip reaches",
    "memory": "device memory is the limit, not the matrix units",
    "links": "waiting for links between devices",
    "network": "waiting for the network",
    "host": "waiting for host memory",
    "bubble": "stages wait for each other",
}


def steptime(figures: Figures) -> Markup | None:
    if figures.get("time") is None:
        return None
    return section(
        "time",
        "Time of a step",
        _lead(figures),
        stacked([Bar(_label(figures), _parts(figures))], "time of a step"),
        _table(figures),
        tag("p", "model FLOPs: ", tag("code", figures.get("time", "formula")), cls="note"),
    )


def _lead(figures: Figures) -> Children:
    return [
        figures.shown("seconds", "time", "step"),
        " a step, ",
        figures.shown("count", "time", "tokens_per_second"),
        f" {figures.get('time', 'unit')} a second, ",
        figures.shown("percent", "time", "mfu"),
        " of ",
        figures.shown("flops a second", "time", "peak"),
        " a device. An estimate: a roofline of the traced step.",
    ]


def _label(figures: Figures) -> Children:
    return ["step  ", figures.shown("seconds", "time", "step")]


def _places(figures: Figures) -> dict[str, list[Place]]:
    """Of each part of a step the figures that add up to it."""
    found = figures.get("time", "exchanges")
    places: dict[str, list[Place]] = {
        "compute": [("time", "compute")],
        "memory": [("time", "memory")],
    }
    for link in ("links", "network", "host"):
        of = [i for i, each in enumerate(found) if each["link"] == link]
        places[link] = [("time", "exchanges", i, "exposed") for i in of]
    places["bubble"] = [("time", "bubble")]
    return {name: of for name, of in places.items() if of and figures.made("sum", *of) > 0}


def _parts(figures: Figures) -> list[Part]:
    step, parts = figures.get("time", "step"), []
    for key, (name, of) in enumerate(_places(figures).items(), start=1):
        size = figures.made("sum", *of)
        tip = f"{FORMS['seconds'](size)}, {percent_text(size / step)}\n{SAYS[name]}"
        parts.append(Part(name, size, TIME[name], tip, str(key)))
    return parts


def _table(figures: Figures) -> Markup:
    rows, step = [], figures.get("time", "step")
    for key, (name, of) in enumerate(_places(figures).items(), start=1):
        share = percent_text(figures.made("sum", *of) / step)
        rows.append(
            tag(
                "tr",
                tag("td", tag("i", key, cls=f"swatch {TIME[name]}"), cls="k"),
                tag("th", name, scope="row"),
                tag("td", figures.derived("sum", "seconds", *of), cls="r"),
                tag("td", share, cls="r"),
                tag("td", SAYS[name], cls="formula"),
            )
        )
    return table(("", "part", "r time", "r of the step", "what it is"), rows, "components")
