"""Page section: step time as a bar of compute, memory, exposed communication and bubble."""

from jaxspeed.planner.page.bars import Bar, BarPart, stacked
from jaxspeed.planner.page.figures import FORMS, Figures, Place, percent_text
from jaxspeed.planner.page.markup import Children, Markup, section, table, tag
from jaxspeed.planner.page.styles import TIME

DESCRIPTIONS = {
    "compute": "matmuls and kernels, at the achieved rate",
    "memory": "memory-bound operations",
    "links": "exposed communication over links",
    "network": "exposed communication over the network",
    "host": "exposed host transfers",
    "bubble": "idle pipeline stages",
}


def step_time(figures: Figures) -> Markup | None:
    if figures.get("time") is None:
        return None
    return section(
        "time",
        "Step time",
        _lead(figures),
        stacked([Bar(_label(figures), _parts(figures))], "step time"),
        _table(figures),
        tag("p", "model FLOPs: ", tag("code", figures.get("time", "formula")), cls="note"),
    )


def _lead(figures: Figures) -> Children:
    return [
        figures.shown("seconds", "time", "step"),
        " per step, ",
        figures.shown("count", "time", "tokens_per_second"),
        f" {figures.get('time', 'unit')} per second, MFU ",
        figures.shown("percent", "time", "mfu"),
        " of ",
        figures.shown("flops a second", "time", "peak"),
        " per device. Estimated by a roofline model of the traced step.",
    ]


def _label(figures: Figures) -> Children:
    return ["step  ", figures.shown("seconds", "time", "step")]


def _places(figures: Figures) -> dict[str, list[Place]]:
    """{part of a step: places of the figures that sum to it}."""
    found = figures.get("time", "exchanges")
    places: dict[str, list[Place]] = {
        "compute": [("time", "compute")],
        "memory": [("time", "memory")],
    }
    for link in ("links", "network", "host"):
        of = [i for i, each in enumerate(found) if each["link"] == link]
        places[link] = [("time", "exchanges", i, "exposed") for i in of]
    places["bubble"] = [("time", "bubble")]
    return {name: of for name, of in places.items() if of and figures.computed("sum", *of) > 0}


def _parts(figures: Figures) -> list[BarPart]:
    step, parts = figures.get("time", "step"), []
    for key, (name, of) in enumerate(_places(figures).items(), start=1):
        size = figures.computed("sum", *of)
        tip = f"{FORMS['seconds'](size)}, {percent_text(size / step)}\n{DESCRIPTIONS[name]}"
        parts.append(BarPart(name, size, TIME[name], tip, str(key)))
    return parts


def _table(figures: Figures) -> Markup:
    rows, step = [], figures.get("time", "step")
    for key, (name, of) in enumerate(_places(figures).items(), start=1):
        share = percent_text(figures.computed("sum", *of) / step)
        rows.append(
            tag(
                "tr",
                tag("td", tag("i", key, cls=f"swatch {TIME[name]}"), cls="k"),
                tag("th", name, scope="row"),
                tag("td", figures.derived("sum", "seconds", *of), cls="r"),
                tag("td", share, cls="r"),
                tag("td", DESCRIPTIONS[name], cls="formula"),
            )
        )
    return table(("", "part", "r time", "r share", "description"), rows, "components")
