"""Compile for a TPU that is not here: libtpu in a child process, compile-only devices.

libtpu makes plain CPU runs print warnings, and one process at a time would hold its lock, so it
never enters the process of the tests. One child serves the calls of a test session: it starts JAX
once, and compiles a program that two tests ask for once (`tests.system.measured`). What it keeps
for that grows without bound; beyond a limit the next call starts another.
"""

import atexit
import functools
import importlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_MOST_KB = 2 << 20


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
    child = _child()
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps([target, topology, kwargs]) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        _child.cache_clear()  # the next call starts another
        pytest.fail(f"{target} on {topology}: the child ended with code {child.wait()}")
    found = json.loads(answer)
    if found["kb"] > _MOST_KB:
        _child.cache_clear()
        atexit.unregister(child.communicate)
        child.communicate()
    if "failed" in found:
        pytest.fail(f"{target} on {topology} failed:\n{found['failed']}")
    return json.dumps(found["value"])


@functools.cache
def _child() -> subprocess.Popen[str]:
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
    child = subprocess.Popen(
        [sys.executable, __file__],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,  # its stderr is among what pytest captured
        text=True,
    )
    atexit.register(child.communicate)  # the end of its input ends it
    return child


def _serve() -> None:
    """One call a line of stdin, one answer a line of stdout; what is printed goes to stderr."""
    from jax.experimental import topologies

    devices = functools.cache(
        lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    )
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        target, topology, kwargs = json.loads(line)
        module, function = target.split(":")
        try:
            called = getattr(importlib.import_module(module), function)
            answer = {"value": called(devices(topology), **json.loads(kwargs))}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        answer["kb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Running a file puts its folder first on the path: `tests/support` would hide real packages.
    sys.path[0] = str(ROOT)
    _serve()
