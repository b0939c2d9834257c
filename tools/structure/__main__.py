"""`python -m tools.structure record | compare | mutations`; see the package's docstring."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("record.json")
PARTS = ("size", "flow", "cpu", "tpu")
VERSIONS = ("jax", "jaxlib", "flax", "libtpu")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.structure", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        command = commands.add_parser(name)
        command.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
        command.add_argument("--file", type=Path, default=RECORD)
    mutating = commands.add_parser("mutations")
    mutating.add_argument("--check", action="store_true", help="find snippets and tests only")
    mutating.add_argument("--only", nargs="+", default=[], metavar="NAME")
    mutating.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.command == "mutations":
        from tools.structure.mutations import check, run

        return check() if chosen.check else run(chosen.only, chosen.workers)
    kept = json.loads(chosen.file.read_text()) if chosen.file.exists() else {}
    made = {"versions": _versions(), **{part: _measure(part) for part in chosen.only}}
    if chosen.command == "record":
        chosen.file.write_text(json.dumps({**kept, **made}, indent=1) + "\n")
        return 0
    found = list(differences({name: kept.get(name) for name in made}, made))
    print("\n".join(found) if found else f"equal: {', '.join(chosen.only)}")
    return bool(found)


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """A line per differing value; for lists, the removed and added items."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            inner = f"{where}: {key}" if where else str(key)
            yield from differences(before.get(key), after.get(key), inner)
    elif isinstance(before, list) and isinstance(after, list):
        yield from (f"{where}: - {one}" for one in before if one not in after)
        yield from (f"{where}: + {one}" for one in after if one not in before)
    elif before != after:
        yield f"{where}: {before} -> {after}{_change(before, after)}"


def _change(before: Any, after: Any) -> str:
    if not all(isinstance(x, int | float) and x for x in (before, after)):
        return ""
    return f" ({(after - before) / before:+.1%})"


def _measure(part: str) -> Any:
    """Measure with late imports: `size` needs neither JAX nor the package."""
    measures: dict[str, Callable[[], Any]] = {
        "size": _size,
        "flow": _flow,
        "cpu": lambda: _programs().cpu_programs(_progress),
        "tpu": lambda: _programs().tpu_programs(_progress),
    }
    return measures[part]()


def _size() -> Any:
    from tools.structure.size import size_of

    return size_of()


def _flow() -> Any:
    _programs()  # which asks for the simulated devices
    from tools.structure.flow import flow

    return flow()


def _programs() -> Any:
    from tools.structure import programs

    return programs


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _versions() -> dict[str, str | None]:
    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {"python": sys.version.split()[0], **{name: of(name) for name in VERSIONS}}


if __name__ == "__main__":
    sys.exit(main())
