"""The package as people install it: every folder is listed, and is in the sdist and the wheel."""

import ast
import collections
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from jaxspeed.cli.report import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"jaxspeed": ROOT / "jaxspeed", "jaxspeed.models": ROOT / "models"}
CONFIGS = {f"configs/{file.name}" for file in (ROOT / "configs").iterdir()}


def packages_on_disk() -> set[str]:
    return {
        ".".join((name, *file.parent.relative_to(folder).parts))
        for name, folder in FOLDERS.items()
        for file in folder.rglob("__init__.py")
    }


def modules_on_disk() -> set[str]:
    return {
        "/".join((*name.split("."), *file.relative_to(folder).parts))
        for name, folder in FOLDERS.items()
        for file in folder.rglob("*.py")
    }


def test_every_folder_of_the_package_is_listed():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == {*packages_on_disk(), "jaxspeed.configs"}


def test_every_folder_with_modules_is_a_package():
    for folder in FOLDERS.values():
        for file in folder.rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"


def test_few_files_share_a_name():
    names = (f.name for folder in FOLDERS.values() for f in folder.rglob("*.py"))
    shared = {name: n for name, n in collections.Counter(names).items() if n > 1}
    del shared["__init__.py"]
    assert len(shared) <= 10 and max(shared.values()) == 2, shared


def test_no_public_class_name_occurs_twice():
    """Except `Config` of the model families."""
    found = collections.Counter(
        node.name
        for file in (ROOT / "jaxspeed").rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in found.items() if count > 1] == []


def test_the_extras_are_those_that_the_readme_may_name():
    extras = set(PROJECT["project"]["optional-dependencies"])
    logs = {"tensorboard", "wandb", "plot"}
    data = {"hf", "s3", "gs", "arrow", "zstd", "sentencepiece", "vision"}
    assert extras == {"test", "tpu", "cuda", "bench", "ray", "docs", "eval", *data, *logs}
    assert set(EXTRAS) <= extras


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """An sdist built from a copy, so that nothing is left beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, source)
    for name in ("jaxspeed", "models", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    (source / "tests/test_package.py").touch()
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    built = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(source.glob("dist/jaxspeed-*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(sdist), "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("jaxspeed-*.whl"))


def test_the_sdist_holds_the_sources_without_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {name.replace("jaxspeed/models/", "models/") for name in modules_on_disk()}
    assert {"CHANGELOG.md", "setup.py", *CONFIGS, *sources} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_wheel_holds_every_module_and_what_modules_read(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules_on_disk() <= names
    files = {"py.typed", "hardware/chips.yaml", "planner/page.html"}
    assert {f"jaxspeed/{file}" for file in files} <= names
    assert {f"jaxspeed/{config}" for config in CONFIGS} <= names
    assert any(name.endswith("/LICENSE") for name in names)


def test_an_old_python_is_told_what_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(SystemExit, match=r"needs Python 3\.12 or newer.*make install"):
        runpy.run_path(str(ROOT / "setup.py"))


def test_models_and_configs_are_read_from_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import jaxspeed, jaxspeed.models\n"
        "for name in jaxspeed.models.FAMILIES: jaxspeed.models.family(name)\n"
        "from jaxspeed.config import load_config\n"
        "assert load_config('tiny').run.steps == 300\n"
        "print(jaxspeed.models.__file__)"
    )
    # -S keeps an editable install's finder out; the libraries are put back by hand.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    program = f"import sys; sys.path[:0] = {[str(tmp_path), *libraries]!r}\n{code}"
    child = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert child.returncode == 0, child.stderr
    assert Path(child.stdout.strip()).parent == tmp_path / "jaxspeed" / "models"


def test_importing_jaxspeed_starts_no_device_and_imports_no_model():
    code = (
        "import sys, jax, jaxspeed\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert 'jaxspeed.models' not in sys.modules"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def test_importing_leaves_the_users_logging_alone():
    """A handler on the root logger would make their own `logging.basicConfig` do nothing."""
    program = "import logging, jaxspeed; assert not logging.root.handlers, logging.root.handlers"
    subprocess.run([sys.executable, "-c", program], check=True)


# {what touches JAX's inner parts, or asks for its version: tests that run on the oldest JAX too}
INNER = {
    "checkpoint/process_agreement.py": "checkpoint/test_several_processes.py",
    "engine/jax_setup.py": "engine/test_starting.py",
    "jaxpr/evaluate.py": "jaxpr/test_evaluate.py",
    "jaxpr/sample_independence.py": "jaxpr/test_sample_independence.py",
    "jaxpr/sample_rules.py": "jaxpr/test_sample_independence.py",
    "jaxpr/traverse.py": "jaxpr/test_traverse.py",
    "known_jax_bugs/table.py": "test_known_jax_bugs.py",
    "launch/environment.py": "launch/test_environment.py",
    "traced_loss/autocast.py": "traced_loss/test_autocast.py",
    "ops/attention_call.py": "ops/test_attention_call.py",
    "ops/cudnn.py": "ops/test_gpu_attention.py",
    "ops/moe/grouped_products.py": "moe/test_grouped_products.py",
    "ops/gpu.py": "ops/test_gpu_attention.py",
    "planner/compile/deviceless_cuda.py": "planner/test_on_platform.py",
    "planner/memory/liveness.py": "planner/test_memory_layout.py",
    "run/ending.py": "checkpoint/test_several_processes.py",
    "run/watchdog.py": "run/test_watchdog.py",
    "train_state/staged_init.py": "train/test_staged_init.py",
    "placement/xla_options.py": "train/test_staged_init.py",
    "ops/token_order.py": "ops/test_token_order.py",
}


def touches_inner_parts(node: ast.AST) -> bool:
    """Whether it imports, or names, a module of JAX without promises, or JAX's version."""
    inner = ("jax._src", "jax.extend")
    match node:
        case ast.ImportFrom(module=str(name)) | ast.Constant(value=str(name)):
            return name.startswith(inner)
        case ast.Import(names=names):
            return any(each.name.startswith(inner) for each in names)
        case ast.Attribute(attr="__version__" | "__version_info__"):
            return True
    return False


def test_what_touches_jaxs_inner_parts_is_tested_on_the_oldest_jax():
    folder = ROOT / "jaxspeed"
    touching = {
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        if any(map(touches_inner_parts, ast.walk(ast.parse(file.read_text()))))
    }
    assert touching == {*INNER}
    makefile = (ROOT / "Makefile").read_text()
    listed = makefile[makefile.index("OLDEST_TESTS =") : makefile.index("OLDEST_VENV")].split()
    for test in INNER.values():
        assert (ROOT / "tests" / test).exists() and test in listed
