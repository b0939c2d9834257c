"""Names of a package that are imported when they are first used."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build `__getattr__` and `__dir__` of a package from its names by module."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in module_of:
            attribute = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
            setattr(sys.modules[package], name, attribute)  # the next use finds it without this
            return attribute
        if importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get, names
