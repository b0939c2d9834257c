"""What the command line and `import jaxspeed` load before they need an array."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspeed

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("flax", "jax", "numpy", "optax", "orbax", "pydantic", "rich", "yaml")
SHOWING = ["rich"]
READING = ["pydantic", "rich", "yaml"]


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (["--help"], []),
        (["plan", "--help"], []),
        (["nonsense"], []),
        (["checkpoint", "list", "no-such-folder"], SHOWING),
        (["train", "no-such-file.yaml"], ["pydantic", "rich"]),
        (["train", "{config}"], READING),
        (["plan", "{config}", "--target", "v5e:2x2"], READING),
        (["plan", "configs/tiny.yaml", "--target", "h101:8"], READING),
        (["config", "{config}"], READING),
    ],
    ids=lambda value: " ".join(value),
)
def test_libraries_that_a_command_loads(arguments, loaded, tmp_path):
    config = tmp_path / "bad.yaml"
    config.write_text("optimizer: {type: adamw, params: {lr: fast}}\n")
    given = [text.format(config=config) for text in arguments]
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules]))\n"
        "from jaxspeed.cli import main\n"
        f"sys.exit(main({given!r}))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == (0 if "--help" in given else 2), child.stderr
    assert child.stdout.splitlines()[-1] == str(loaded)


def test_a_command_does_not_collect_garbage_as_it_exits():
    """Walking all objects of JAX would take half a second."""
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # runs after the later ones
        "from jaxspeed.cli import main\n"
        "main(['config', 'configs/tiny.yaml'])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.stdout.splitlines()[-1] == "True", child.stderr


def test_train_collects_garbage_again_after_it():
    code = (
        "import gc\n"
        "from jaxspeed.cli import main\n"
        "print(main(['train', 'no-such-file.yaml']), gc.isenabled(), gc.get_freeze_count())"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.stdout == "2 True 0\n", child.stderr


@pytest.mark.parametrize(
    ("kernel", "given", "seen"),
    [
        ("always [madvise] never", "", ["", "glibc.malloc.hugetlb=1"]),
        ("always [madvise] never", "glibc.rtld.nns=4", ["glibc.rtld.nns=4", "{}:{}"]),
        ("always [madvise] never", "glibc.malloc.hugetlb=0", ["glibc.malloc.hugetlb=0"]),
        ("[always] madvise never", "", [""]),
        (None, "", [""]),
    ],
)
def test_train_restarts_once_for_huge_pages_where_it_must_ask(kernel, given, seen, tmp_path):
    setting = tmp_path / "enabled"
    if kernel:
        setting.write_text(kernel)
    replaced = f"train._HUGE_PAGES_SETTING = pathlib.Path({str(setting)!r})"
    tunables, errors = tunables_of_train(replaced, given)
    assert "no-such-file.yaml" in errors
    assert tunables == [text.format(given, "glibc.malloc.hugetlb=1") for text in seen]


@pytest.mark.parametrize("command", ["train", "eval", "sample", "check"])
def test_a_command_names_the_imports_before_it_makes_them(command):
    code = (
        "import contextlib, sys\n"
        "from jaxspeed.cli import main\n"
        "from jaxspeed.metrics import start_lines as module\n"
        "class Seen(Exception): pass\n"
        "def showing(what): raise Seen(what, [m for m in ('flax', 'jax') if m in sys.modules])\n"
        "module.start_lines = lambda console: showing\n"
        f"try: main([{command!r}, 'configs/tiny.yaml'])\n"
        "except Seen as seen: print(*seen.args)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.stdout == "importing JAX, starting devices []\n", child.stderr


def test_train_restarts_before_it_imports_much():
    code = (
        "import os, sys\n"
        f"os.execv = lambda *_: print([m for m in {HEAVY} if m in sys.modules])\n"
        "sys.argv[1:] = ['train', 'no-such-file.yaml']\n"
        "from jaxspeed.cli import main, train\n"
        "train._text = lambda _: '[madvise]'\n"
        "main()"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.stdout == "[]\n", child.stderr


def tunables_of_train(replaced, given, *arguments):
    """Those with which a process that trains started, in turn; and its error output."""
    code = (
        "import os, pathlib; print(os.environ.get('GLIBC_TUNABLES', ''), os.getpid(), flush=True)\n"
        "from jaxspeed.cli import main, train\n"
        f"{replaced}\n"
        "main()"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, "train", "no-such-file.yaml", *arguments]
    environment = {**os.environ, "GLIBC_TUNABLES": given, "COLUMNS": "200"}
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    lines = [line.rpartition(" ") for line in child.stdout.splitlines()]
    assert len({line[2] for line in lines}) == 1  # the process stays the same
    return [line[0] for line in lines], child.stderr


def test_importing_jaxspeed_loads_nothing_else():
    code = f"import jaxspeed, sys; print([m for m in {HEAVY} if m in sys.modules])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"


def test_a_compiler_starts_before_its_plan_imports_jax():
    code = (
        "import sys, jaxspeed\n"
        "from jaxspeed.planner.compile import in_child\n"
        "class Seen(Exception): pass\n"
        f"def start(*_): raise Seen([m for m in {HEAVY} if m in sys.modules])\n"
        "in_child.Workers = start\n"
        "try: jaxspeed.plan('configs/tiny.yaml', 'cpu:2', compile=True)\n"
        "except Seen as seen: print(seen)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.stdout.splitlines()[-1:] == [str(READING)], child.stderr


def test_initialize_and_config_load_the_schema_alone():
    """Nothing of an engine, nor what loads a config."""
    code = (
        "import jaxspeed, sys; jaxspeed.initialize, jaxspeed.Config\n"
        "print(*sorted(m[9:] for m in sys.modules if m.startswith('jaxspeed.')))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sections = ("expert_section", "lora_section", "run_sections", "tensor_section", "zero_section")
    inside = sorted(
        {*sections, "config", "parallelism", "patterns", "remat", "schema", "types", "verdicts"}
    )
    above = [f"config.{name}" for name in inside]
    expected = ["axes", "config", *above, "deepspeed_habits", "errors"]
    expected += ["initialization", "lazy_names"]
    assert child.stdout.split() == expected


def test_importing_config_builds_no_validator():
    """Those of all sections take half as long as importing the config."""
    code = (
        "import jaxspeed; jaxspeed.config.examine\n"
        "from jaxspeed.config.types import Section\n"
        "def below(kind): return [y for x in kind.__subclasses__() for y in (x, *below(x))]\n"
        "print(len(below(Section)) > 40, [x for x in below(Section) if x.__pydantic_complete__])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "True []\n"


def test_the_engine_loads_no_reader_of_data():
    """Grain takes as long to import as the engine, and adds a handler to the root logger."""
    code = "import jaxspeed, sys; jaxspeed.Engine; print('grain' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "False\n"


@pytest.mark.parametrize("package", [jaxspeed, jaxspeed.config], ids=lambda each: each.__name__)
def test_every_public_name_is_imported_from_the_module_that_type_checkers_see(package):
    tree = ast.parse(Path(package.__file__).read_text())
    lazy = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(lazy.test) == "TYPE_CHECKING"
    seen = {
        alias.name: node.module
        for node in lazy.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name, module in seen.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
        assert name in package._NAMES[module.removeprefix(f"{package.__name__}.")]
    assert sorted(seen) == sorted(name for names in package._NAMES.values() for name in names)
    assert set(seen) <= set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'initialise'"):
        package.initialise  # noqa: B018


def test_a_folder_is_imported_when_it_is_first_used():
    code = "import jaxspeed; print(jaxspeed.config.Config is jaxspeed.Config)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "True\n"
