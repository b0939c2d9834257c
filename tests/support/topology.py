"""Compile for a TPU that is not here: libtpu in a child process, compile-only devices.

libtpu makes plain CPU runs print warnings, and one process at a time would hold its lock, so it
never enters the process of the tests.
"""

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_on_topology(target: str, topology: str, **kwargs: Any) -> Any:
    """Call `module:function` as `function(devices, **kwargs)` in a child process.

    Args:
      target: a function that is importable from the repository's root,
        `tests.hlo.hlo_programs:compile_all`.
      topology: a TPU topology's name, `v5e:2x4`.
      kwargs: what JSON can hold.

    Returns:
      What the function returned, by way of JSON. Equal calls of one test session run once.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu (pip install jaxspeed[tpu])")
    return json.loads(_run_once(target, topology, json.dumps(kwargs, sort_keys=True)))


@functools.cache
def _run_once(target: str, topology: str, kwargs: str) -> str:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # A program for absent devices cannot be loaded back from the compilation cache.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(
            part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part
        ),
    }
    environment.pop("XLA_FLAGS", None)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        child = subprocess.run(
            [sys.executable, __file__, target, topology, kwargs, str(result)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if child.returncode != 0 or not result.exists():
            pytest.fail(f"{target} on {topology} failed:\n{child.stdout}\n{child.stderr}")
        return result.read_text()


def _main(target: str, topology: str, kwargs: str, result: str) -> None:
    from jax.experimental import topologies

    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    module, function = target.split(":")
    value = getattr(importlib.import_module(module), function)(
        description.devices, **json.loads(kwargs)
    )
    Path(result).write_text(json.dumps(value))


if __name__ == "__main__":
    # Running a file puts its folder first on the path: `tests/support` would hide real packages.
    sys.path[0] = str(ROOT)
    _main(*sys.argv[1:])
