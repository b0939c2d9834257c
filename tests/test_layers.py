"""A folder imports only folders above it in `LAYERS`, and no imports between files form a cycle.

An import inside a function or under TYPE_CHECKING counts like any other: it hides a cycle from
Python, not from the reader. A folder inside another has a layer of its own. The lists of known
violations only shrink: a new one fails, and so does one that is listed and gone.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

PACKAGE = Path(__file__).resolve().parents[1] / "jaxspeed"
LAYERS = (
    "lazy_names.py",
    "errors.py",
    "near_words.py",
    "deepspeed_habits.py",
    "axes.py",
    "known_jax_bugs",
    "communication.py",
    "metric_names.py",
    "launch",
    "config",
    "hardware",
    "jaxpr",
    "placement",
    "disk",
    "quantization",
    "ops",
    "ops/moe",
    "optim",
    "zero3",
    "remat",
    "tensor_parallel",
    "sequence_parallel",
    "objectives",
    "user_models",
    "adapters",
    "train_state",
    "traced_loss",
    "offload",
    "pipeline",
    "ring_reduction",
    "train",
    "vision",
    "data",
    "checkpoint",
    "interop",
    "interop/torch_runs",
    "generation",
    "rewards",
    "hlo",
    "metrics",
    "planner/trace",
    "planner/memory",
    "planner/time",
    "engine",
    "parameter_server",
    "parameter_server/ray",
    "launch/ray",
    "run",
    "initialization.py",
    "planner/compile",
    "planner/search",
    "planner",
    "__init__.py",
    "cli",
    "__main__.py",
)
VIOLATIONS: set[tuple[str, str]] = set()  # (file, a folder below its own that it imports)
IN_CYCLES: set[str] = set()

FILES = {
    ".".join(("jaxspeed", *path.parts)).removesuffix(".__init__"): path.with_suffix(".py")
    for path in (file.relative_to(PACKAGE).with_suffix("") for file in PACKAGE.rglob("*.py"))
}


def imports(file: Path) -> Iterator[Path]:
    """The files of the package that a file imports."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (FILES[alias.name] for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports within the package are absolute"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found = (FILES.get(name, FILES.get(node.module or "")) for name in names)
            yield from filter(None, found)


IMPORTS = {file: set(imports(file)) - {file} for file in FILES.values()}


def layer(file: Path) -> str:
    return str(file if file.parent == Path(".") else file.parent)


def test_every_folder_has_its_place():
    assert {layer(file) for file in IMPORTS} == set(LAYERS)


def test_a_folder_imports_only_what_stands_above_it():
    found = {
        (str(file), layer(other))
        for file, others in IMPORTS.items()
        for other in others
        if LAYERS.index(layer(other)) > LAYERS.index(layer(file))
    }
    assert found == VIOLATIONS


def test_no_chain_of_imports_leads_back_to_its_file():
    assert {str(file) for file in IMPORTS if in_cycle(file)} == IN_CYCLES


def in_cycle(file: Path) -> bool:
    reached: set[Path] = set()
    new = set(IMPORTS[file])
    while new:
        reached |= new
        new = {other for each in new for other in IMPORTS[each]} - reached
    return file in reached
