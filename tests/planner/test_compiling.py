"""Compiles in a child process: the outcome of a direct compile, and an end with the parent."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import pytest

from jaxspeed.engine import compiled_report
from jaxspeed.errors import ConfigError, ModelError, PlacementError, RunError
from jaxspeed.hardware.targets import target_of
from jaxspeed.hlo import CompiledReport
from jaxspeed.planner.compile import in_child
from jaxspeed.planner.compile.child import PrintedProgram
from jaxspeed.planner.compile.deviceless_cuda import target_config
from jaxspeed.planner.compile.in_child import StepCompiler, compile_for
from jaxspeed.planner.compile.outcome import Outcome, out_of_memory
from tests.planner import jobs
from tests.support.covering import covering
from tests.support.topology import ROOT, run_on_topology

GIB = 1024**3
HAS_CUDA = any(importlib.util.find_spec(plugin) for plugin in in_child.CUDA_PLUGINS)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu (pip install jaxspeed[tpu])"
)
CPU = target_of("cpu:2")


@pytest.mark.full  # test_executable.py runs a step that was compiled so
def test_the_step_is_the_one_that_would_run_here():
    there = compile_for(target_of("cpu:8"), jobs.small).report
    program, batch = jobs.small(jax.devices())
    here = compiled_report(program, batch)
    assert there.argument_bytes == here.argument_bytes > 0
    assert there.output_bytes == here.output_bytes and there.alias_bytes == here.alias_bytes
    counted = [{(one.kind, one.axes) for one in found.collectives} for found in (there, here)]
    assert counted[0] == counted[1] != set()


@needs_libtpu
def test_a_tpu_compile_equals_a_direct_one():
    outcome = compile_for(target_of("v5e:2x2"), jobs.small)
    direct = run_on_topology("tests.planner.direct:read_of_small", "v5e:2x2")
    found = outcome.report
    assert [found.argument_bytes, found.temp_bytes, found.output_bytes] == direct["bytes"]
    # There by the program's own text, here by what XLA printed while it compiled.
    assert [[one.kind, one.bytes, one.runs] for one in found.collectives] == direct["collectives"]
    assert found.flops == direct["flops"] > 0
    assert found.separates_host and outcome.fits(target_of("v5e:2x2"))


def test_a_program_that_cannot_be_printed_afterwards_is_read_from_what_was_printed(tmp_path):
    class Mute:
        def as_text(self):
            raise AssertionError("libtpu cannot print some programs")

    text = "HloModule jit_step"
    (tmp_path / "module_0000.jit_step.cl_1.after_optimizations.txt").write_text(text)
    (tmp_path / "module_0000.jit_step.cl_1.before_optimizations.txt").write_text("another")
    (tmp_path / "module_0001.jit_step_2.cl_1.after_optimizations.txt").write_text("a later phase")
    assert PrintedProgram(Mute(), tmp_path, CPU, "jit_step").as_text() == text
    assert PrintedProgram(Mute(), tmp_path, target_of("2x v5e:2x2"), "jit_step").as_text() == ""


@needs_libtpu
def test_a_step_that_does_not_fit_has_an_outcome_with_its_needs():
    outcome = compile_for(target_of("v5e:1x1"), jobs.huge)
    assert outcome.report is None and not outcome.fits(target_of("v5e:1x1"))
    assert outcome.refused.needed > 400 * 10**9


def test_an_error_in_the_child_process_is_raised_here_and_its_end_is_reported():
    """One process for both. One that is killed: test_workers.py."""
    with StepCompiler(CPU) as compiler:
        compiler.submit(jobs.refused)
        with pytest.raises(PlacementError, match="no place for 2"):
            compiler.outcome()
        compiler.submit(jobs.dies)
        with pytest.raises(
            RunError, match=r"cpu:2: the compile failed \(exit code 3\):\nits last words"
        ):
            compiler.outcome()


def test_patience_ends_it():
    begun = time.perf_counter()
    with pytest.raises(RunError, match=r"the compile timed out after 0\.5 s"):
        compile_for(CPU, jobs.forever, patience=0.5)
    assert time.perf_counter() - begun < 60


@pytest.mark.parametrize(
    ("name", "code"),
    # By default test_workers.py has it, for the same kind of process.
    covering([("SIGINT", 130), ("SIGTERM", -15), ("SIGKILL", -9)], []),
)
def test_no_child_process_outlives_its_parent(tmp_path, name, code):
    told = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.planner.waiting", str(told)]
    parent = subprocess.Popen(command, cwd=ROOT, env=environment)
    child = int(_until(lambda: told.exists() and told.read_text()))
    parent.send_signal(getattr(signal, name))
    assert parent.wait(60) == code
    _until(lambda: not _lives(child))
    _until(lambda: not list(tmp_path.glob("jaxspeed-plan-*")))


def _until(condition):
    for _ in range(600):
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("waited for a minute")


def _lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_compiler_that_is_not_used_leaves_no_process_and_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), StepCompiler(CPU):
        (child,) = _children()
        assert list(tmp_path.glob("jaxspeed-plan-*"))
        1 / 0  # noqa: B018
    _until(lambda: not _lives(child))
    assert not list(tmp_path.iterdir())


def _children():
    """The processes that compile for this one."""
    stats = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for each in stats for pid in each.read_text().split()]
    return [pid for pid in pids if b"compile.workers" in Path(f"/proc/{pid}/cmdline").read_bytes()]


MISSING = {"v5p:2x2x1": "pip install jaxspeed[tpu]", "h100:8": "pip install jaxspeed[cuda]"}


@pytest.mark.parametrize("written", MISSING)
def test_a_missing_compiler_is_reported_with_its_pip_install(monkeypatch, written):
    monkeypatch.setattr(in_child.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as told:
        compile_for(target_of(written), jobs.small)
    assert MISSING[written] in str(told.value)


def test_a_chip_that_no_compiler_takes_is_for_the_estimate_alone():
    with pytest.raises(ConfigError, match="no compiler here supports v100-32g"):
        compile_for(target_of("v100-32g:8"), jobs.small)


def test_a_model_that_cannot_be_pickled_is_refused():
    with pytest.raises(ModelError, match="functions of a module"):
        compile_for(CPU, lambda devices: None)


def test_a_model_of_the_running_script_is_refused(monkeypatch):
    def job(devices): ...

    job.__module__, job.__qualname__ = "__main__", "job"
    monkeypatch.setattr(sys.modules["__main__"], "job", job, raising=False)
    with pytest.raises(ModelError, match="Put them into a module that the script imports"):
        compile_for(CPU, job)


# As libtpu 0.0.51 said it, and as its elders did.
SAID = {
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (600.00G) exceeds available HBM (15.75G).": 600 * GIB,
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 21.5G of 15.75G hbm. Exceeded hbm capacity by 5.75G.": int(21.5 * GIB),
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.5MiB.": int(3.5 * 1024**2),
    "RESOURCE_EXHAUSTED: something else": None,
}


@pytest.mark.parametrize("said", SAID)
def test_a_compilers_out_of_memory_message_is_parsed(said):
    refused = out_of_memory(said)
    assert refused.needed == SAID[said] and refused.message == said


@pytest.mark.parametrize(
    "said",
    [
        "INTERNAL: Mosaic failed to compile TPU kernel",
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space "
        "vmem while allocating on stack for %gather_fusion = bf16[4096,512] fusion(%param.38)",
    ],
)
def test_another_error_is_not_taken_for_one_of_the_devices_memory(said):
    assert out_of_memory(said) is None


def outcome_of(**figures):
    zeros = dict.fromkeys(("argument", "temp", "output", "alias", "host", "peak"), 0)
    named = {f"{name}_bytes": size for name, size in {**zeros, **figures}.items()}
    report = CompiledReport(**named, flops=None, bytes_accessed=None, collectives=None)
    return Outcome(report, None, 1.0)


def test_aliased_outputs_are_not_counted_twice():
    assert outcome_of(argument=7, temp=5, output=4, alias=3).device_bytes == 13


def test_a_step_has_to_fit_the_device_and_its_host():
    target = target_of("h100:8")
    device, host = target.chip.memory, target.chip.host_memory
    assert outcome_of(temp=device, host=host).fits(target)
    assert not outcome_of(temp=device + 1).fits(target)
    assert not outcome_of(temp=device, host=host + 1).fits(target)
    assert outcome_of(temp=device, host=host + 1).fits_device(target)


def test_a_gpus_target_config_has_the_tables_figures():
    told = target_config(target_of("h200:8"))
    assert "device_memory_size: 151397597184" in told and "core_count: 132" in told
    assert told.count("{") == told.count("}")


@pytest.mark.full
@pytest.mark.skipif(not HAS_CUDA, reason="needs jax[cuda13] (3.4 GB) to compile for a GPU")
@pytest.mark.parametrize("chip", ["h100", "h200", "a100-40g", "a100-80g", "b200", "l4"])
def test_a_gpu_that_is_not_here_is_compiled_for(chip):
    target = target_of(f"{chip}:8")
    bf16 = [("bf16", {"enabled": True}), ("zero_optimization", {"stage": 3})]
    outcome = compile_for(target, jobs.Changed(bf16))
    assert outcome.fits(target) and outcome.report.separates_host
    assert {"all-gather", "reduce-scatter"} <= {one.kind for one in outcome.report.collectives}


@pytest.mark.full
@pytest.mark.skipif(not HAS_CUDA, reason="needs jax[cuda13] (3.4 GB) to compile for a GPU")
def test_the_kernels_for_packed_documents_are_compiled_for_a_hopper_that_is_not_here():
    """With ptxas, so that layouts, products and shared memory are those of its instructions."""
    target = target_of("h100:1")
    assert compile_for(target, jobs.packed).fits(target)


def test_an_answer_is_plain_data():
    refused = out_of_memory(next(iter(SAID)))
    figures = Outcome(None, refused, 2.0).figures(target_of("v5e:1x1"))
    assert json.loads(json.dumps(figures)) == {
        "fits": False,
        "device_bytes": 600 * GIB,
        "host_bytes": 0,
        "refused": refused.message,
        "seconds": 2.0,
        "kept": None,
    }
